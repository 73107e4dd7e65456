"""Gradient sums between replicas that split a layer differently, and the flat buffers beneath."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from simulator.estimate.memory import MemoryModel
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.families import build_model
from simulator.network.network import MeasuredNetwork, Network
from tests.simulator.worlds import every_pool
from tests.worker.random_plan import any_plan
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import drawn, plan_of, small_job
from worker.distributed.interface import Collective
from worker.layout.rank_layout import (
    TIED,
    atoms_held,
    groups_of,
    rank_places,
    sync_buckets,
)
from worker.layout.tensor_table import holdings_for, tensors_of
from worker.models.apply_plan import build_layer, tie
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.profiling.compute_time import ComputeTimer
from worker.profiling.timeline import Recorder
from worker.training import gradient_sync
from worker.training.flat_buffers import layer_buffers
from worker.training.full_tensors import load_full_tensors, merge_ranks, rank_tensors
from worker.training.gradient_sync import GradientSync
from worker.training.precision import FP64
from worker.training.zero1 import owned_buckets

TIED_JOB = small_job(tied=True)
LLAMA = small_job("llama", tied=False)  # Two key and value heads for four atoms: partial sums.


def buffers(job, plan, place, group):
    holdings = holdings_for(plan, job)
    layers = [
        build_layer(
            job,
            index,
            tp=place.tp,
            tp_index=place.index,
            group=group,
            context=MicroBatchContext(),
            dtype=torch.float64,
            device="cpu",
        )
        for index in place.layers
    ]
    tie(layers)
    held = atoms_held(tp=place.tp, index=place.index, atoms=job.max_tp)
    return layer_buffers(
        layers,
        tensors_of(job),
        atoms=job.max_tp,
        held=held,
        precision=FP64,
        moments=2,
        owned=owned_buckets(holdings, place.rank, zero=0),
        device=torch.device("cpu"),
    )


def synced(job, plan, *, fill):
    """Give every rank gradients, sum them, and return the result of each rank."""
    holdings = holdings_for(plan, job)
    places = rank_places(plan)

    def body(transport):
        place = places[transport.rank]
        for ranks in groups_of(plan, holdings):
            if place.rank in ranks:
                transport.group(ranks)
        group = transport.group(place.tp_ranks) if place.tp > 1 else None
        kept = buffers(job, plan, place, group)
        for buffer in kept.values():
            for slot, view in zip(buffer.slots, buffer.views(buffer.gradient), strict=True):
                view.fill_(fill(place, slot.spec))
        sync = GradientSync(place, holdings, kept, transport, Recorder(), ComputeTimer())
        for layer in kept:
            sync.start(layer)
        sync.finish()
        return kept

    return run_as_threads(len(places), body)


@pytest.mark.parametrize("ends_at", [1, 3, 99])
def test_a_sum_is_noted_at_the_first_layer_at_which_it_has_ended(ends_at):
    """And at the latest when all are waited for; time that sums take is no compute time."""
    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    holdings, place = holdings_for(plan, LLAMA), rank_places(plan)[0]
    kept, busy, slow = buffers(LLAMA, plan, place, None), ComputeTimer(), AtOnce()
    sync = GradientSync(place, holdings, kept, slow, Recorder(), busy)
    noted = []
    for number, layer in enumerate(kept):
        slow.is_over = number >= ends_at
        sync.start(layer)
        noted.append(len(busy._step.sums))
    sync.finish()
    assert noted == [number if number >= ends_at else 0 for number in range(len(kept))]
    assert len(busy._step.sums) == len(kept)
    assert all(begun <= ended for begun, ended in busy._step.sums)
    assert busy._step.compute_s() == 0.0


def test_every_holder_gets_the_sum_over_replicas():
    plan = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 1, 1), (1, 5, 4)]), (1, [(0, 5, 1)]))
    replicas = {0: 1.0, 1: 10.0, 2: 100.0}
    for rank in synced(TIED_JOB, plan, fill=lambda place, _: replicas[place.pipeline]):
        for buffer in rank.values():
            for slot, view in zip(buffer.slots, buffer.views(buffer.gradient), strict=True):
                # Both ends of pipelines 0 and 1 hold the tied tensor; the single rank of pipeline 2
                # once.
                wanted = 122.0 if buffer.layer == TIED else 111.0
                assert torch.all(view == wanted), (buffer.layer, slot.spec.name)


def test_equal_gradients_of_a_stage_count_once_and_partial_ones_are_summed():
    plan = plan_of(4, (1, [(0, 5, 4)]), (1, [(0, 5, 1)]))
    for rank in synced(LLAMA, plan, fill=lambda *_: 1.0):
        for buffer in rank.values():
            for slot, view in zip(buffer.slots, buffer.views(buffer.gradient), strict=True):
                partial = slot.spec.split_dim is None and slot.spec.gradient == "partial"
                assert torch.all(view == (5.0 if partial else 2.0)), (buffer.layer, slot.spec)


def test_gather_and_scatter_of_atoms_round_trip():
    plan = plan_of(8, (1, [(0, 5, 1)]))
    buffer = buffers(TIED_JOB, plan, rank_places(plan)[0], None)[2]
    flat = torch.zeros_like(buffer.master)
    for number, view in enumerate(buffer.views(flat)):
        view.copy_(torch.arange(view.numel()).view(view.shape) + 1000.0 * number)
    again = torch.zeros_like(flat)
    for wanted in (range(1), range(1, 3), range(3, 4)):
        buffer.scatter_atoms(again, wanted, buffer.gather_atoms(flat, wanted))
    assert torch.equal(buffer.split_part(again), buffer.split_part(flat))
    one = buffer.gather_atoms(flat, range(1, 2))
    assert one.sum() == sum(
        view.chunk(4, slot.spec.split_dim)[1].sum()
        for slot, view in zip(buffer.split.slots, buffer.views(flat), strict=False)
    )
    assert buffer.gather_atoms(flat, range(4)).data_ptr() == flat.data_ptr(), (
        "no copy of everything"
    )


@pytest.mark.parametrize("job", [TIED_JOB, LLAMA], ids=["tied", "grouped heads"])
def test_full_tensors_survive_a_change_of_plan(job):
    one, other = (
        plan_of(2, (2, [(0, 2, 2), (2, 5, 4)]), (2, [(0, 5, 1)])),
        plan_of(4, (1, [(0, 4, 4), (4, 5, 1)]), (1, [(0, 3, 1), (3, 5, 2)])),
    )
    start = merged(job, one, None)
    assert {key[0] for key in start} >= set(range(5))
    moved = merged(job, other, start)
    back = merged(job, one, moved)
    for key, values in start.items():
        assert torch.equal(back[key], values), key


def merged(job, plan, logical):
    """Load full tensors into all ranks of a plan and merge them again."""
    places = rank_places(plan)

    def body(transport):
        place = places[transport.rank]
        group = transport.group(place.tp_ranks) if place.tp > 1 else None
        kept = buffers(job, plan, place, group)
        for buffer in kept.values():
            if logical is None:
                for number, context in enumerate(buffer.moments):
                    context.copy_(buffer.master * (number + 2))
            else:
                buffer.master.zero_()
                load_full_tensors(buffer, logical, FP64)
        return rank_tensors(kept.values())

    return merge_ranks(run_as_threads(len(places), body), tensors_of(job))


class AtOnce(Collective):
    """A group whose sums have ended as soon as they have begun, unless ``is_over`` is cleared."""

    size, index = 2, 0
    is_over = True

    def start_all_reduce(self, tensor, op="sum"):  # noqa: ARG002 - the interface's
        return self

    def wait(self):
        """Return at once."""

    def is_done(self):
        return self.is_over

    def group(self, _):
        """Stand for the transport, too."""
        return self


def test_copies_of_finished_sums_are_freed_before_the_last_layer():
    """A rank that is coarser than its replicas sums copies, together as large as its gradients."""
    plan = plan_of(4, (1, [(0, 5, 4)]), (1, [(0, 5, 1)]))
    holdings, place = holdings_for(plan, TIED_JOB), rank_places(plan)[4]
    kept = buffers(TIED_JOB, plan, place, None)
    sync = GradientSync(place, holdings, kept, AtOnce(), Recorder(), ComputeTimer())
    copied, most = 0, 0
    for layer in kept:
        sync.start(layer)
        copies = [each for each in sync._under_way if each.copied_bytes]
        copied += sum(each.bucket.layer == layer for each in copies)
        most = max(most, len({each.bucket.layer for each in copies}))
    assert copied > 4, "this rank sums copies"
    assert most == 1, "only those of one layer at once"
    sync.finish()


class Behind(Collective):
    """A group of a library whose waits block its device alone, which works when it is looked at.

    Until the device has finished an operation, the library keeps its tensors.
    """

    size, index = 2, 0

    def __init__(self):
        self.kept, self.started = [], []

    def group(self, _):
        """Stand for the transport, too."""
        return self

    def check(self):
        """Let the device finish its oldest operation."""
        self.kept.pop(0)

    def start_all_reduce(self, tensor, op="sum"):  # noqa: ARG002 - the interface's
        self.started.append(tensor.numel())
        self.kept.append(tensor)
        return Started(self, tensor)


class Started:
    """One operation of it."""

    def __init__(self, library, tensor):
        self.library, self.tensor = library, tensor

    def wait(self):
        """Return at once."""

    def is_done(self):
        return not any(each is self.tensor for each in self.library.kept)


@pytest.fixture
def coarse():
    """A rank that is coarser than its replicas: its buffers, its place and all its sums."""
    plan = plan_of(4, (1, [(0, 5, 4)]), (1, [(0, 5, 1)]))
    holdings, place = holdings_for(plan, TIED_JOB), rank_places(plan)[4]
    return buffers(TIED_JOB, plan, place, None), place, holdings


@pytest.mark.parametrize("at_once", [0, 1, 2, 3])
def test_copies_of_unfinished_sums_take_no_more_memory_than_is_planned(
    monkeypatch, coarse, at_once
):
    """A copy that is larger than that is alone; no start waits, and all sums keep their order."""
    kept, place, holdings = coarse
    buckets = sync_buckets(holdings)
    sizes = [kept[bucket.layer].copied_bytes(bucket) for bucket in buckets]
    monkeypatch.setattr(gradient_sync, "COPIES_BYTES_MAX", at_once * max(sizes))
    slow = Behind()
    sync = GradientSync(place, holdings, kept, slow, Recorder(), ComputeTimer())
    most = []

    def copies() -> int:
        return sum(each.numel() * 8 for each in slow.kept if each._base is None)

    start = slow.start_all_reduce

    def noted(tensor, op="sum"):
        started = start(tensor, op)
        most.append(copies())
        return started

    monkeypatch.setattr(slow, "start_all_reduce", noted)
    for layer in kept:
        sync.start(layer)
    assert sum(sizes) > 4 * max(sizes)
    assert len(slow.started) < len(buckets), "the rest is queued"
    sync.finish()
    assert 0 < max(most) <= max(at_once, 1) * max(sizes)
    assert slow.started == [kept[each.layer].gather_bucket(
        kept[each.layer].gradient, each).numel() for each in buckets]  # fmt: skip


@pytest.mark.parametrize("most", [0, 5000])
def test_queued_sums_are_right(monkeypatch, most):
    monkeypatch.setattr(gradient_sync, "COPIES_BYTES_MAX", most)
    test_every_holder_gets_the_sum_over_replicas()
    test_equal_gradients_of_a_stage_count_once_and_partial_ones_are_summed()


@pytest.mark.parametrize("max_tp", [4, 6])
def test_the_simulator_knows_the_largest_copy_of_each_rank(max_tp, examples):
    """Of random plans, also where one TP degree does not divide another."""
    model = build_model("gpt2", layers=3, hidden=24, heads=12, ffn=48, vocab=48, tied=False)
    job = replace(small_job(max_tp=max_tp), model=model)
    draw, found = drawn(f"copies {max_tp}"), 0
    cluster = every_pool()
    network = Network(cluster.catalogue, MeasuredNetwork(), dict(cluster.zone_regions), {})
    costs = LayerCosts(job, profile=None, catalogue=cluster.catalogue, network=network)
    for _ in range(5 * examples):
        plan = any_plan(draw, job)
        holdings, places = holdings_for(plan, job), rank_places(plan)
        model = MemoryModel(plan, costs, lambda _: 0.0)
        predicted = iter(model._largest_copies())
        most = {place.rank: 0 for place in places}
        for bucket in sync_buckets(holdings):
            split = [s for s in holdings.tables[bucket.layer] if s.split_dim is not None]
            # Without the padding, which counts in small models alone.
            size = 4 * sum(math.prod(s.shape) for s in split) * len(bucket.atoms) // max_tp
            for rank in () if bucket.with_unsplit else bucket.ranks:
                place = places[rank]
                if bucket.atoms != atoms_held(tp=place.tp, index=place.index, atoms=max_tp):
                    most[rank] = max(most[rank], size)
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                ranks = [most.pop(next(iter(most))) for _ in range(stage.tp)]
                here = next(predicted)
                assert here == pytest.approx(max(ranks), rel=1e-3), plan
                found += any(ranks)
    assert found > examples
