"""The bytes between stages that the estimate counts are those that the ranks send."""

from __future__ import annotations

from collections import Counter

import pytest

from simulator.spec.plan import Pipeline, Plan, Stage
from tests.simulator.worlds import ZONES, place, world_of
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels, small_job
from worker.layout.rank_layout import rank_places
from worker.training.trainer import RankTrainer


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("degrees", "schedule"), [((2, 2), "1f1b"), ((1, 2), "gpipe"), ((2, 4, 1), "1f1b")]
)
def test_bytes_between_zones_are_those_that_the_ranks_send(degrees, schedule, shares):
    cuts = [(0, 2), (2, 3), (3, 5)] if len(degrees) == 3 else [(0, 2), (2, 5)]
    stages = tuple(
        Stage(cut, tp, (place(zone=zone),))
        for cut, tp, zone in zip(cuts, degrees, ZONES, strict=False)
    )
    plan = Plan(2, (Pipeline(4, stages),), schedule, sequence_parallel=shares)
    job = small_job(tied=False, sequence=8)  # Nothing is summed between stages.
    zone_of = [stages[at.stage].places[0].zone for at in rank_places(plan)]

    def body(transport: ThreadTransport) -> Counter[tuple[str, str]]:
        sent: Counter[tuple[str, str]] = Counter()
        send = transport.send

        def counted(tensor, *, to):
            sent[zone_of[transport.rank], zone_of[to]] += tensor.numel() * tensor.element_size()
            return send(tensor, to=to)

        transport.send = counted
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        trainer.step()  # Its first message is the shape.
        sent.clear()
        trainer.step()
        return sent

    measured = sum(run_as_threads(len(zone_of), body), Counter())
    assert world_of(job).estimator.bytes_between_zones(plan) == dict(measured)
