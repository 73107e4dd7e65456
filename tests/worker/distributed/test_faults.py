"""After a rank's death the others notice at once, one sentence says which and where, and no process
is left.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import EXAMPLES
from tests.worker.small_run import run, write

WORDS = {"sync": "gradient sync", "vote": "the vote", "step": "the optimizer step"}
# Ranks 0 and 1 are the first stage of a pipeline, 2 is its second, 3 is another pipeline.
PHASES = {
    "forward": (2, 0, 1, 3),
    "backward": (3, 0, 1, 2),
    "send": (0, 1, 2),
    "receive": (1, 0, 2),
    "wait": (2, 0, 1, 3),
    "sync": (0, 1, 2, 3),
    "vote": (1, 0, 2, 3),
    "step": (3, 0, 1, 2),
}
CASES = [
    (phase, rank)
    for phase, ranks in PHASES.items()
    for rank in (ranks if EXAMPLES > 50 else ranks[:1])
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), CASES)
def test_all_ranks_learn_of_a_death(warm, files, phase, rank):
    done = run(warm, files, SAILOR_FAIL_AT=f"{rank}:{phase}:1")
    assert done.code == 1
    others = ", ".join(str(other) for other in range(4) if other != rank)
    told = re.fullmatch(
        rf"error: rank {rank} was killed by SIGKILL in {WORDS.get(phase, phase)} of step 1; "
        rf"ranks {others} noticed within (\d\.\d\d) s\n",
        done.err,
    )
    # Ranks that take longer than 1 s are not in the sentence.
    assert told, done.err
    steps = [json.loads(line)["step"] for line in done.out.splitlines()]
    assert steps in ([0], [0, 1])


@pytest.mark.slow
def test_death_before_the_rendezvous_is_reported(warm, files):
    done = run(warm, files, SAILOR_FAIL_AT="0:start:0")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: rank 0 was killed by SIGKILL in the start of step 0")


def test_non_finite_loss_ends_the_run_with_step_and_layer(warm, files):
    write(files, change=("learning_rate = 0.01", "learning_rate = 1e30\nskip_nonfinite = 0"))
    done = run(warm, files)
    assert done.code == 1
    assert re.fullmatch(r"error: step [12]: .* layer \d.* rank \d.*\n", done.err), done.err
