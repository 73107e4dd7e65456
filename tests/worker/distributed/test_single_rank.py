"""A single rank learns of an abort, and may still finish the step that it voted for."""

from __future__ import annotations

import pytest

from worker.distributed.interface import AbortedError
from worker.distributed.single_rank import SingleRankTransport


def test_first_abort_ends_the_run_and_the_last_vote_stays():
    transport = SingleRankTransport()
    transport.record_vote((3, [1.0]))
    transport.record_vote((4, [2.0]))
    transport.check()
    transport.abort("the agent ended the generation")
    transport.abort("later")
    with pytest.raises(AbortedError, match="rank 0: the agent ended the generation"):
        transport.check()
    assert transport.last_votes(0.0) == [(4, [2.0])]
    transport.close()
