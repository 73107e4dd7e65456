"""The runtime under NCCL's rules: it trains, survives deaths in any phase, and is used again."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.worker.distributed.nccl_rules import (
    NONSENSE,
    Device,
    EmulatedNccl,
    Group,
    World,
    _Communicator,
)
from tests.worker.distributed.nccl_runs import PHASES, DiedError, closing_within, run_generation
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.rank_processes import exchanged, exchanged_by
from tests.worker.training_runs import drawn, plan_of, small_job, trained
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, check_state
from worker.distributed import backends
from worker.distributed.backends import NCCL_DEFAULTS, NCCL_SETTINGS
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.fault_injection import FailPoint
from worker.training.pipeline_stage import StageRunner
from worker.training.precision import FP64
from worker.training.step_vote import StepVote

JOB = small_job(sequence=8)
MIXED = plan_of(2, (2, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 3, 1), (3, 5, 1)]))
SHARED = replace(MIXED, sequence_parallel=True)
INTERLEAVED = replace(
    plan_of(
        1,
        (2, [(0, 1, 2), (1, 3, 1), (3, 4, 2), (4, 5, 1)]),
        (6, [(0, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1)]),
    ),
    schedule="interleaved",
    virtual_stages=2,
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What the runtime sets for NCCL is forgotten after a test."""
    for name in (*NCCL_SETTINGS, *NCCL_DEFAULTS):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def losses(plan):
    run = trained(JOB, plan, steps=2, precision=FP64, compare=False)
    return [report.loss for report in run.reports]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_random_plans_train_as_they_do_without_those_rules(schedule, examples):
    draw = drawn(f"nccl {schedule}")
    for _ in range(max(3, examples // 10)):
        plan = any_plan(draw, JOB, ranks_max=6)
        plan = type(plan)(plan.micro_batch_size, plan.pipelines, schedule)
        if schedule == "interleaved":
            plan = any_interleaved_plan(draw, JOB, ranks_max=6) or INTERLEAVED
        if plan.device_count == 1:
            continue
        plan = replace(plan, sequence_parallel=draw.random() < 0.5)
        found = run_generation(JOB, plan)
        wanted = losses(plan)
        assert [each.verdict for each in found] == ["done"] * plan.device_count, plan
        assert all(each.losses == pytest.approx(wanted, rel=1e-12) for each in found), plan
        assert not any(each.contexts_elsewhere for each in found)


def test_no_communicator_is_made_after_the_start():
    world = World()
    run_generation(JOB, MIXED, world=world, steps=0)
    made = set(world.communicators)
    world = World()
    run_generation(JOB, MIXED, world=world, steps=2)
    assert set(world.communicators) == made


def test_groups_gather_and_sum_parts():
    found = {}

    def at_end(trainer, transport):
        found[trainer.rank] = exchanged(transport.group((0, 1, 2)))

    plan = plan_of(8, (1, [(0, 2, 1), (2, 4, 1), (4, 5, 1)]))
    outcomes = run_generation(JOB, plan, steps=0, at_end=at_end)
    assert [each.verdict for each in outcomes] == ["done"] * 3
    assert found == {rank: exchanged_by(rank, 3) for rank in range(3)}


WORLDS = {
    "nonsense is left": {},
    "nothing is left": {"leaves": None},
    "waits raise": {"notices": True},
}


@pytest.mark.parametrize(
    "plan", [MIXED, SHARED, INTERLEAVED], ids=["mixed", "sequence parallel", "interleaved"]
)
@pytest.mark.parametrize("how", WORLDS)
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_of_a_death_name_it_and_can_go_on(phase, how, plan):
    """Whatever phase it dies in, no survivor is killed, hangs, or names somebody else."""
    rank = {"send": 0, "receive": 4}.get(phase, 2)
    step = 0 if phase in {"met", "verified"} else 1
    with closing_within(3.0):
        world, fail_at = World(**WORLDS[how]), FailPoint(rank, phase, step)
        found = run_generation(JOB, plan, steps=3, fail_at=fail_at, world=world)
    others = [each for number, each in enumerate(found) if number != rank]
    assert found[rank].verdict == "dead"
    # A rank that was making a communicator with the dead one is not used again; steps make none.
    allowed = {"recovered", "replaced"} if phase == "met" else {"recovered"}
    assert {each.verdict for each in others} <= allowed
    assert {each.lost for each in others} == {rank}
    assert len({each.step for each in others}) == 1, "survivors disagree about the last step"
    assert not any(each.contexts_elsewhere for each in others)


def stop(trainer):
    placement = SimpleNamespace(waits=True)
    return SnapshotManager(trainer, None, None, None, None, placement)._all_replicated(True)


def evaluate(trainer):
    trainer._module = SimpleNamespace(metric_names=["loss"])
    trainer._pipeline.evaluate = lambda _: {"loss": [1.0, 2.0]}
    return trainer.evaluate(None)


def name_bad_layer(trainer):
    return trainer._vote.first_bad_layer(None)


@pytest.mark.parametrize("leaves", [NONSENSE, None])
@pytest.mark.parametrize("decide", [stop, evaluate, name_bad_layer, check_state])
def test_a_sum_that_a_death_cut_short_decides_nothing(decide, leaves):
    """It ends like a complete one, and the tensor may still hold this rank's own part."""
    world, decided = World(leaves=leaves), []

    def at_end(trainer, transport):
        if trainer.rank == 1:
            while not world.devices[0].unfinished:
                transport.check()
                time.sleep(0.001)
            raise DiedError
        decided.append(decide(trainer))

    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    with closing_within(3.0):
        survivor, _ = run_generation(JOB, plan, steps=0, world=world, at_end=at_end)
    assert (survivor.verdict, survivor.lost, decided) == ("recovered", 1, [])


@pytest.mark.parametrize("is_eager", [True, False])
def test_lazy_communicators_would_hang_the_survivors_of_a_death_before_the_first_step(
    monkeypatch, is_eager
):
    """The first operation then makes the communicator, on the host, and nothing interrupts it."""
    make = EmulatedNccl.open

    def make_or_die(library, *args):
        if library.device.rank == 2:
            raise DiedError  # All members know already that it takes part.
        return make(library, *args)

    monkeypatch.setattr(EmulatedNccl, "open", make_or_die)
    with closing_within(3.0):
        found = run_generation(JOB, MIXED, rules={"is_eager": is_eager})
    verdicts = {each.verdict for number, each in enumerate(found) if number != 2}
    assert ("hangs" in verdicts) is not is_eager, verdicts


@pytest.mark.parametrize("sets_environment", [True, False])
def test_without_its_settings_torch_kills_the_survivors(sets_environment):
    world = World()
    device, peer = world.device(0), world.device(1)
    world.communicators["0/pair"] = _Communicator(2, {1: peer})
    peer.is_dead = True
    library = EmulatedNccl(world, device, "0", sets_environment=sets_environment)
    group = library.open("pair", HashStore(), 0, 2)
    if sets_environment:
        group.send([torch.ones(1)], 1, 0)
    else:
        with pytest.raises(SystemExit):
            group.send([torch.ones(1)], 1, 0)
    assert device.was_killed is not sets_environment


@pytest.mark.parametrize("is_set", [True, False])
def test_without_its_settings_torch_keeps_the_survivors_for_a_minute(monkeypatch, is_set):
    if not is_set:
        monkeypatch.delitem(NCCL_SETTINGS, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    with closing_within(2.0):
        found = run_generation(JOB, MIXED, steps=3, fail_at=FailPoint(2, "backward", 1))
    verdicts = {each.verdict for number, each in enumerate(found) if number != 2}
    assert ("recovered" in verdicts) is is_set
    assert ("replaced" in verdicts) is not is_set


@pytest.mark.parametrize("at_once", [True, False])
def test_aborts_one_by_one_would_wait_for_each_other(at_once):
    """Two communicators of one device wait for a lost rank: each abort waits for the other."""
    world = World()
    device, peer = world.device(0), world.device(1)
    library = EmulatedNccl(world, device, "0", aborts_at_once=at_once)
    groups = []
    for name in ("first", "second"):
        other = Group(world, peer, f"0/{name}", 1, 2)
        peer.threads.add(threading.get_ident())
        world.communicators[f"0/{name}"] = _Communicator(2, {1: peer})
        groups.append(library.open(name, HashStore(), 0, 2))
        other.communicator = groups[-1].communicator
        groups[-1].send([torch.ones(1)], 1, 0)
    with closing_within(0.2):
        for thread in library.abort(groups):
            thread.join()
    assert device.hangs is not at_once


def test_the_first_of_several_aborts_begins_before_the_others(monkeypatch):
    """However late its thread begins."""
    monkeypatch.setattr(backends, "_HEAD_START_S", 10.0)
    starting, begun = iter([0.05, 0.0]), []
    calls = [lambda: begun.append("first"), lambda: begun.append("second")]
    for thread in backends.at_once(calls, lambda: time.sleep(next(starting))):
        thread.join()
    assert begun == ["first", "second"]


def test_the_group_that_votes_is_aborted_first(monkeypatch):
    """Else a vote could complete on gradients whose sums were aborted before it began."""
    orders, abort = {}, EmulatedNccl.abort

    def recorded(library, groups):
        orders.setdefault(library.device.rank, [group._name for group in groups])
        return abort(library, groups)

    monkeypatch.setattr(EmulatedNccl, "abort", recorded)
    with closing_within(3.0):
        run_generation(JOB, MIXED, steps=1, fail_at=FailPoint(2, "backward", 0))
    assert orders.keys() >= {0, 1, 3, 4}
    assert {order[0] for order in orders.values()} == {"0/0-1-2-3-4"}


def test_a_death_while_communicators_are_made_is_named_though_the_library_fails_first(monkeypatch):
    failed, in_own_thread = threading.Event(), ProcessTransport._run_in_own_thread

    def fail(*_):
        failed.set()
        raise RuntimeError("CUDA error: unspecified launch failure")

    def die_later(transport, act, doing):
        if transport.rank == 1:
            assert failed.wait(20)
            time.sleep(0.2)
            raise DiedError
        return in_own_thread(transport, act, doing)

    monkeypatch.setattr(EmulatedNccl, "open", fail)
    monkeypatch.setattr(ProcessTransport, "_run_in_own_thread", die_later)
    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    survivor, _ = run_generation(JOB, plan, steps=0)
    assert (survivor.verdict, survivor.lost) == ("recovered", 1)


def test_threads_use_their_own_device():
    found = run_generation(JOB, MIXED, rules={"enters_threads": False})
    assert any(each.contexts_elsewhere for each in found), "the rule has teeth"


@pytest.mark.slow
def test_thirty_reconfigurations_in_one_process_leave_nothing_behind():
    world, store, draw = World(), HashStore(), drawn("thirty")
    threads = files = 0
    for generation in range(30):
        plan = any_plan(draw, JOB, ranks_max=4, stages_max=3)
        dies = generation % 5 == 3 and plan.device_count > 1
        found = run_generation(
            JOB, plan, steps=1, generation=generation, world=world, store=store,
            fail_at=FailPoint(1, "backward", 0, generation) if dies else None,
        )  # fmt: skip
        survives = "recovered" if dies else "done"
        wanted = ["dead" if dies and n == 1 else survives for n in range(len(found))]
        assert [each.verdict for each in found] == wanted, (generation, plan)
        if generation == 0:
            threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("of_whole_device", [False, True])
def test_timeline_that_waits_for_the_whole_device_would_wait_for_requests_made_ahead(
    of_whole_device,
):
    """The stream that computes, which is the thread here, waits for what was taken only."""
    plan = plan_of(4, (2, [(0, 2, 1), (2, 5, 1)]))
    wait = Device.synchronize if of_whole_device else lambda _: None
    with closing_within(2.0):
        found = run_generation(JOB, plan, finish_device_work=wait)
    assert any(each.verdict == "hangs" for each in found) is of_whole_device
    assert of_whole_device or {each.verdict for each in found} == {"done"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_forward_pass_that_waits_for_the_whole_device_does_not_wait_for_itself(
    monkeypatch, schedule
):
    """As where the allocator returns memory: a gradient that needs the pass is requested later."""
    world, forward = World(), StageRunner.forward

    def and_return_memory(*args, **options):
        result, here = forward(*args, **options), threading.get_ident()
        next(each for each in world.devices if here in each.threads).synchronize()
        return result

    monkeypatch.setattr(StageRunner, "forward", and_return_memory)
    count = 4 if schedule == "gpipe" else 1
    plan = plan_of(8 // count, (count, [(0, 2, 1), (2, 5, 1)]))
    with closing_within(2.0):
        found = run_generation(JOB, replace(plan, schedule=schedule), world=world)
    assert {each.verdict for each in found} == {"done"}


def test_a_blocked_operation_ends_at_the_deadline(monkeypatch):
    """A kernel never fails by itself: our own thread gives it up."""
    cast = StepVote.cast

    def once_given_up(vote, *args):
        if vote._rank == 0:
            assert vote._group._transport._monitor.failed.wait(20)
        return cast(vote, *args)

    monkeypatch.setattr(StepVote, "cast", once_given_up)
    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    found = run_generation(JOB, plan, deadline_s=1.0)
    assert "did not finish within 1 s" in str(found[1].failure)
    assert not any(each.contexts_elsewhere for each in found)
