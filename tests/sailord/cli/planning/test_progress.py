"""Lines of progress while a plan is searched for."""

from __future__ import annotations

import pytest

from sailord.cli.planning.plan import PROGRESS_S, _progress


def test_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = [0.0]
    tell = _progress(lambda: times[0])
    for step in range(8):
        times[0] = step * PROGRESS_S / 2
        tell(f"{step} of about 7 plans judged")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"{step} of about 7 plans judged" for step in (2, 4, 6)]
