"""DeepSpeed in workers that change plans: stopped, killed, and followed by the sailor engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from simulator.inputs.job_file import load_job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.control.fake_agents import Agents, Nursery
from tests.worker.training_runs import alone, trained
from worker.data.open_data import open_data

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

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


def plan_of(*pipelines: tuple[int, list[tuple[int, int, int, str]]]) -> Plan:
    """Build a plan from (micro batches, [(first layer, end, TP degree, node), ...])."""
    return Plan(
        2,
        tuple(
            Pipeline(
                count,
                tuple(
                    Stage((first, end), tp, (Place("cpu", "m", "z", node=node),))
                    for first, end, tp, node in stages
                ),
            )
            for count, stages in pipelines
        ),
    )


MIXED = plan_of((3, [(0, 2, 2, "a"), (2, 4, 1, "b")]), (1, [(0, 4, 1, "c")]))
TWO = plan_of((2, [(0, 4, 1, "a")]), (2, [(0, 4, 1, "b")]))
FOUR = plan_of(*((2, [(0, 1, 1, first), (1, 4, 1, last)]) for first, last in ("ab", "cd")))
ALONE = plan_of((4, [(0, 4, 1, "a")]))


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    process = Nursery(tmp_path_factory.mktemp("nursery"))
    yield process
    process.end()


@pytest.fixture
def make_agents(tmp_path: Path, nursery: Nursery) -> Iterator:
    made = []

    def make(job: str = JOB) -> Agents:
        made.append(Agents(tmp_path, nursery, job, NODES, wait_s=WAIT_S))
        return made[-1]

    yield make
    for agents in made:
        agents.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted run by the sailor engine on one rank."""
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB)
    job = load_job(path)
    run = trained(job, alone(job), steps=100, compare=False, data=open_data(job, path.parent))
    return [report.loss for report in run.reports]


def check_losses(agents: Agents, expected: list[float]) -> set[int]:
    """Check every logged loss against the uninterrupted run; return the logged steps."""
    seen = set()
    for process in agents.processes:
        for word in process.words:
            if word.get("loss") is not None and 0 < word["step"] <= len(expected):
                wanted = pytest.approx(expected[word["step"] - 1], rel=TOLERANCE)
                assert word["loss"] == wanted, word
                seen.add(word["step"])
    return seen


def stop(agents: Agents, generation: int, *, after: int) -> int:
    """Stop a generation and return the step."""
    agents.wait_taking(generation, "running", step=after)
    agents.gang(generation)[-1].tell(order="stop", stop_at=after)
    agents.wait_taking(generation, "stopped")
    (step,) = {process.word["step"] for process in agents.gang(generation)}
    assert {process.word["sealed_at"]["step"] for process in agents.gang(generation)} == {step}
    agents.order(generation, order="abort")
    agents.wait_taking(generation, "idle")
    return step


def test_killed_rank_loses_no_sealed_step(make_agents, expected):
    """Waits for the dead rank end; DeepSpeed restores the survivors' snapshot."""
    agents = make_agents()
    agents.start(FOUR, 1)
    agents.wait_taking(1, "running", step=3)
    *survivors, victim = agents.gang(1)
    agents.kill(victim)
    agents.wait(lambda: all(p.word["taking"] == "broken" for p in survivors), needs=survivors)
    assert {tuple(p.word["broken_peers"]) for p in survivors} == {("d",)}
    # Nodes a and b have all layers of the same point.
    at = min(p.word["sealed_at"]["step"] for p in survivors[:2])
    assert at >= 3
    agents.order(1, order="abort")
    agents.wait(lambda: all(p.word["taking"] == "idle" for p in survivors), needs=survivors)
    restore = {"step": at, "generation": 1, "source": "memory"}
    agents.start(TWO, 2, restore)
    end = stop(agents, 2, after=at + 2)
    assert {p.pid for p in agents.gang(2)} == {p.pid for p in survivors[:2]}
    assert check_losses(agents, expected) >= set(range(1, end + 1))


@pytest.mark.parametrize("changes", ["", "zero = 1"], ids=["plain", "zero"])
def test_loss_curve_continues_across_engines(make_agents, expected, changes):
    """The sailor engine, DeepSpeed on four ranks, two and one, and the sailor engine again."""
    agents = make_agents(JOB + changes)
    restore, at, outputs = None, 0, []
    for generation, plan in enumerate((MIXED, FOUR, TWO, ALONE, MIXED), start=1):
        agents.start(plan, generation, restore)
        at = stop(agents, generation, after=at + 3)
        outputs.append([agents.output(p) for p in agents.gang(generation)])
        restore = {"step": at, "generation": generation, "source": "memory"}
    assert check_losses(agents, expected) >= set(range(1, 16))
    why = "the sailor engine trains this plan, which DeepSpeed cannot: its pipelines differ"
    told = "".join(text for texts in outputs for text in texts)
    assert f"generation 1: {why}" in told
    assert f"generation 5: {why}" in told
    assert "generation 2: the sailor" not in told
