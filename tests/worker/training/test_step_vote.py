"""The vote: norms that do not depend on the plan, and totals that all ranks get."""

from __future__ import annotations

import math

import pytest
import torch

from tests.worker.random_plan import any_plan
from tests.worker.threads import run_as_threads
from tests.worker.training.test_gradient_sync import buffers
from tests.worker.training_runs import SomeLabels, drawn, plan_of, small_job
from worker.layout.rank_layout import holdings_of, rank_places
from worker.layout.tensor_table import table_of
from worker.training.snapshot_hook import NoSnapshots
from worker.training.step_vote import StepContribution, StepVote, square_sum
from worker.training.trainer import RankTrainer

JOB = small_job(tied=True)


def totals(plan, *, contribution):
    """Return every rank's totals when each gradient is the initial weight."""
    tables = [table_of(JOB, index) for index in range(len(JOB.model.layers))]
    holdings = holdings_of(plan, tables, atoms=JOB.max_tp)
    places = rank_places(plan)

    def body(transport):
        place = places[transport.rank]
        everybody = transport.group(tuple(range(len(places))))
        group = transport.group(place.tp_ranks) if place.tp > 1 else None
        kept = buffers(JOB, plan, place, group)
        for buffer in kept.values():
            buffer.gradient.copy_(buffer.master)
        vote = StepVote(place.rank, holdings, everybody, torch.device("cpu"))
        return vote.cast(kept, contribution(place))

    return run_as_threads(len(places), body)


def test_norm_is_bit_equal_under_every_plan(examples):
    norms = set()
    for seed in range(examples // 5):
        plan = any_plan(drawn(f"vote {seed}"), JOB)
        found = totals(plan, contribution=lambda _: StepContribution())
        assert len({totals_from.norm for totals_from in found}) == 1
        norms.add(found[0].norm)
    assert len(norms) == 1


def test_tied_tensor_counts_once_in_the_norm():
    plan = plan_of(8, (1, [(0, 5, 1)]))
    (totals_from,) = totals(plan, contribution=lambda _: StepContribution())
    kept = buffers(JOB, plan, rank_places(plan)[0], None)
    wanted = math.sqrt(sum((buffer.master**2).sum().item() for buffer in kept.values()))
    assert totals_from.norm == pytest.approx(wanted, rel=1e-13)
    assert (
        sum(p.numel() for buffer in kept.values() for p in buffer.parameters)
        == sum(
            tensor.elements
            for layer in JOB.model.layers
            for tensor in layer.tensors
            if tensor.tied_to is None
        )
        + 2 * JOB.model.hidden
    ), "the vocabulary of 30 is padded to 32 rows"


def test_contributions_are_summed():
    plan = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (3, [(0, 5, 1)]))
    big = 2**52 // 4
    found = totals(
        plan,
        contribution=lambda place: StepContribution(
            0.5, samples=1, labels=place.rank, digest_sum=big + place.rank, wants_to_stop=False
        ),
    )
    for totals_from in found:
        assert (totals_from.loss_sum, totals_from.samples, totals_from.labels) == (2.0, 4, 6)
        assert totals_from.digest_sum == 4 * big + 6
        assert not totals_from.stop


def test_one_stop_request_stops_all_ranks_at_the_same_step():
    plan = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (3, [(0, 5, 1)]))

    class Wish(NoSnapshots):
        def wants_to_stop(self, step):
            return step == 1

    def body(transport):
        trainer = RankTrainer(JOB, plan, transport.rank, transport, SomeLabels(JOB))
        if transport.rank == 2:
            trainer.snapshot_hook = Wish()
        return [trainer.step().stop for _ in range(3)]

    assert run_as_threads(4, body) == [[False, True, False]] * 4


def test_non_finite_totals_are_reported():
    plan = plan_of(2, (1, [(0, 5, 2)]), (3, [(0, 5, 1)]))
    for loss in (math.nan, math.inf):
        found = totals(
            plan,
            contribution=lambda place, loss=loss: StepContribution(loss if place.rank else 0.0),
        )
        assert not any(totals_from.is_finite for totals_from in found)
    assert all(v.is_finite for v in totals(plan, contribution=lambda _: StepContribution(1.0)))


def test_squares_are_summed_in_fp64():
    large = torch.tensor([1e30, 3.0, 1e-30])
    assert square_sum(large).item() == (large.double() ** 2).sum().item()
    many = torch.full((200_001,), 0.1)
    assert square_sum(many).item() == pytest.approx(
        200_001 * float(many[0].double() ** 2), rel=1e-12
    )
