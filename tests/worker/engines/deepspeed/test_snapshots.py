"""DeepSpeed in workers that change plans: stopped, killed, and followed by the sailor engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.control.fake_agents import Agents, ForkServer, plan_of, uninterrupted_losses

pytestmark = pytest.mark.slow

JOB = """
[model]
family = "llama"
layers = 2
hidden = 16
heads = 4
kv_heads = 2
ffn = 32
vocab = 61
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
learning_rate = 0.01
schedule = "cosine"
steps = 200
clip_norm = 0.5
engine = "deepspeed"
"""
NODES = ("a", "b", "c", "d")
WAIT_S = 120.0
"""Seconds for one event; each process imports DeepSpeed first."""
TOLERANCE = 1e-5
"""Relative difference of each loss from an uninterrupted run of one rank with the sailor engine."""


MIXED = plan_of((3, [(0, 2, 2, "a"), (2, 4, 1, "b")]), (1, [(0, 4, 1, "c")]), microbatch=2)
TWO = plan_of((2, [(0, 4, 1, "a")]), (2, [(0, 4, 1, "b")]), microbatch=2)
FOUR = plan_of(
    *((2, [(0, 1, 1, first), (1, 4, 1, last)]) for first, last in ("ab", "cd")), microbatch=2
)
ALONE = plan_of((4, [(0, 4, 1, "a")]), microbatch=2)


@pytest.fixture
def make_agents(tmp_path: Path, fork_server: ForkServer) -> Iterator:
    made = []

    def make(job: str = JOB) -> Agents:
        made.append(Agents(tmp_path, fork_server, job, NODES, wait_s=WAIT_S))
        return made[-1]

    yield make
    for agents in made:
        agents.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted run by the sailor engine on one rank."""
    return uninterrupted_losses(tmp_path_factory.mktemp("job"), JOB, steps=100)


def test_killed_rank_loses_no_sealed_step(make_agents, expected):
    """Waits for the dead rank end; DeepSpeed restores the survivors' snapshot."""
    agents = make_agents()
    agents.start(FOUR, 1)
    agents.wait_taking(1, "running", step=3)
    *survivors, victim = agents.gang(1)
    agents.kill(victim)
    agents.wait(lambda: all(p.status["taking"] == "broken" for p in survivors), needs=survivors)
    assert {tuple(p.status["broken_peers"]) for p in survivors} == {("d",)}
    # Nodes a and b have all layers of the same point.
    at = min(p.status["sealed_at"]["step"] for p in survivors[:2])
    assert at >= 3
    agents.order(1, order="abort")
    agents.wait(lambda: all(p.status["taking"] == "idle" for p in survivors), needs=survivors)
    restore = {"step": at, "generation": 1, "source": "memory"}
    agents.start(TWO, 2, restore)
    end = agents.stop(2, after=at + 2)
    agents.leave(2)
    assert {p.pid for p in agents.gang(2)} == {p.pid for p in survivors[:2]}
    assert set(agents.check_losses(expected, rel=TOLERANCE)) >= set(range(1, end + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [pytest.param("", marks=pytest.mark.at_length), "zero = 1"], ids=["plain", "zero"]
)
def test_loss_curve_continues_across_engines(make_agents, expected, changes):
    """The sailor engine, DeepSpeed on four ranks, two and one, and the sailor engine again."""
    agents = make_agents(JOB + changes)
    restore, at, outputs = None, 0, []
    for generation, plan in enumerate((MIXED, FOUR, TWO, ALONE, MIXED), start=1):
        agents.start(plan, generation, restore)
        at = agents.stop(generation, after=at + 3)
        agents.leave(generation)
        outputs.append([agents.output(p) for p in agents.gang(generation)])
        restore = {"step": at, "generation": generation, "source": "memory"}
    assert set(agents.check_losses(expected, rel=TOLERANCE)) >= set(range(1, 16))
    why = "the sailor engine trains this plan, which DeepSpeed cannot: its pipelines differ"
    told = "".join(text for texts in outputs for text in texts)
    assert f"generation 1: {why}" in told
    assert f"generation 5: {why}" in told
    assert "generation 2: the sailor" not in told
