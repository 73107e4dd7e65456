"""How a rank ends its generation."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.documents.problems import InputError, Problem
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.checkpoint.piece_queue import PieceQueue
from worker.control import generation, state_fetch, work_folder
from worker.control.assignment import Assignment
from worker.control.generation import GenerationEndedError, GenerationRun
from worker.control.state_fetch import StateFetch
from worker.distributed.interface import PeerLostError
from worker.distributed.rank_protocol import OtherCodeError
from worker.script.script_error import FAILURE_MAX
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.step_report import StepReport

PLAN = Plan(
    1,
    tuple(Pipeline(1, (Stage((0, 4), 1, (Place("cpu", "m", "z", node=node),)),)) for node in "ab"),
)


def run_of(tmp_path: Path, report: Any) -> GenerationRun:
    spec = {
        "job": "job", "generation": 2, "rank": 0, "ranks": 2, "threads": 1, "host": "127.0.0.1",
        "folder": str(tmp_path / "2" / "0"), "memory": str(tmp_path), "node": "a", "term": 1,
        "device": 0, "device_type": "cpu", "memory_every": 1, "persist_every": None,
        "restore": {"step": 3, "generation": 1, "source": "memory"}, "peers": {}, "ticket": "t",
    }  # fmt: skip
    assignment = Assignment(spec)
    assignment.__dict__["plan"] = PLAN
    return GenerationRun(assignment, report)


def training(run: GenerationRun, *, steps: int | None = None) -> SimpleNamespace:
    """Give a run a trainer whose next step, the fourth, is the last one before a stop."""
    step = StepReport(3, 1.0, 1.0, 4, 0.5, "h", 4, 0.1, skipped=False, skipped_steps=0, stop=True)
    trainer = SimpleNamespace(
        job=SimpleNamespace(steps=steps, sequence=1),
        progress=SimpleNamespace(step=3),
        log=lambda _: None,
        evaluate_if_due=lambda: None,
        end_log=lambda: None,
        unlogged="",
    )

    def last_step() -> StepReport:
        trainer.progress.step = 4
        return step

    trainer.step = last_step
    run._trainer = trainer
    run._snapshots = SimpleNamespace(
        after_step=lambda: None,
        stalls=SimpleNamespace(stall_s=None, late_s=None, settle_s=None),
        seal_at_stop=lambda **_: None,
    )
    return trainer


def test_contradicted_rank_withdraws_before_it_closes_and_reports_its_node(
    tmp_path: Path,
) -> None:
    done, reports = [], []
    run = run_of(tmp_path, lambda status, _: reports.append(status))

    def withdraw(error):
        done.append(error.blamed)
        return True

    run._snapshots = SimpleNamespace(
        withdraw_if_blamed=withdraw, close=lambda: done.append("closed")
    )
    run._ended.set()

    def differ(_):
        raise ReplicaMismatchError("differs", blamed=(1,), agreed_at=40)

    run.run(differ)
    assert done == [(1,), "closed"]
    assert [s["taking"] for s in reports if s.get("withdrew")] == ["failed"]
    assert [s["contradicted"] for s in reports if s["taking"] == "failed"] == [["b"]]
    assert [s["agreed_at"] for s in reports if s["taking"] == "failed"] == [40]
    assert not {"contradicted", "agreed_at"}.intersection(reports[-1])
    assert run.state == "idle"


@pytest.mark.parametrize("fails", ["log", "evaluate_if_due"])
def test_failed_logger_is_reported_without_the_secrets_of_the_job(
    tmp_path: Path, monkeypatch, fails: str
):
    """Also one that fails at the figures of the last evaluation."""
    monkeypatch.setattr(work_folder, "_hidden", {"s3cret"})
    reports: list[dict[str, Any]] = []
    run = run_of(tmp_path, lambda status, _: reports.append(status))
    trainer = training(run, steps=4)

    def fail(*_: object) -> None:
        trainer.unlogged = "WandB is not used any more: OSError: no such key: s3cret"

    setattr(trainer, fails, fail)
    run._train()
    assert reports[-1]["taking"] == "stopped"
    assert reports[-1]["unlogged"] == "WandB is not used any more: OSError: no such key: ***"


@pytest.mark.parametrize(("steps", "evaluated"), [(None, [3]), (4, [3, 4])])
def test_an_evaluation_does_not_put_off_an_ordered_stop(tmp_path: Path, steps, evaluated):
    """A notice leaves no time for it; the next generation begins with it, as after a loss."""
    run = run_of(tmp_path, lambda *_: None)
    trainer, found = training(run, steps=steps), []
    trainer.evaluate_if_due = lambda: found.append(trainer.progress.step)
    run._train()
    assert found == evaluated


@pytest.mark.parametrize(("steps", "ends"), [(None, 0), (4, 1), (3, 1)])
def test_loggers_are_told_of_the_end_also_where_a_loss_has_interrupted_the_last_evaluation(
    tmp_path: Path, steps, ends: int
):
    """The generation that begins at the last step repeats that, and a logger may open for it."""
    run = run_of(tmp_path, lambda *_: None)
    trainer, told = training(run, steps=steps), []
    trainer.evaluate_if_due = lambda: told.append("evaluated")
    trainer.end_log = lambda: told.append("ended")
    run._train()
    assert told.count("ended") == ends
    assert told[-1] == "ended" or not ends


def test_ranks_of_two_versions_fail_and_it_is_no_bug_of_the_job(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    run = run_of(tmp_path, lambda status, _: reports.append(status))
    run._ended.set()

    def differ(_):
        raise OtherCodeError("drain the node of rank 0")

    assert run.run(differ), "its process is well"
    (failed,) = [status for status in reports if status["taking"] == "failed"]
    assert failed["failure"] == "drain the node of rank 0"
    assert not failed["is_bug"]


def told_run(folder: Path):
    """Return a run, what it reports, and an event that it has reported a loss."""
    reports: list[dict[str, object]] = []
    broken = threading.Event()

    def report(status, _):
        reports.append(status)
        if status["taking"] == "broken":
            broken.set()

    return run_of(folder, report), reports, broken


def test_a_failure_of_any_length_is_one_short_line_in_the_status(tmp_path: Path, capsys) -> None:
    """An agent reads no line of more than 1 MiB, and would never hear of the failure."""
    reports: list[dict[str, Any]] = []
    run = run_of(tmp_path, lambda status, _: reports.append(status))
    run._ended.set()

    def refuse(_):
        keys = "\n".join(f"Missing key layer.{n}" for n in range(100_000))
        raise InputError(Problem("train.py:3", f"RuntimeError: {keys}"))

    assert run.run(refuse)
    (failed,) = [status for status in reports if status["taking"] == "failed"]
    assert failed["failure"].startswith("train.py:3: RuntimeError: Missing key layer.0 Missing key")
    assert len(failed["failure"]) == FAILURE_MAX
    assert "Missing key layer.99999" in capsys.readouterr().out, "the log has all of it"


def test_worker_without_room_says_once_which_snapshot_is_complete_on_all_ranks(tmp_path) -> None:
    reports: list[dict[str, Any]] = []
    run = run_of(tmp_path, lambda status, _: reports.append(status))
    run._report_no_room(9, 7)
    run._report_now()
    short, next_one = reports
    assert (short["room_short"], short["complete_step"]) == (9, 7)
    assert not {"room_short", "complete_step"} & next_one.keys()
    run.end()
    with pytest.raises(GenerationEndedError):
        run._report_no_room(9, 7)


@pytest.mark.parametrize(
    ("error", "is_reusable"),
    [(RuntimeError("CUDA error: unspecified launch failure"), False), (OSError("full"), True)],
)
def test_survivor_whose_last_seal_fails_still_reports_the_loss(
    tmp_path: Path, error: Exception, is_reusable: bool
) -> None:
    """Earlier snapshots stay; it is no bug of the job."""
    run, reports, broken = told_run(tmp_path)

    def lose(_):
        raise PeerLostError(1, "vote")

    def fail(_):
        raise error

    run._after_loss.save = fail
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run.run(lose)), daemon=True)
    thread.start()
    assert broken.wait(20)
    run.end()
    thread.join(20)
    assert ended == [is_reusable]
    assert reports[-1 if not is_reusable else -2]["broken_peers"] == ["b"]
    assert not any(status.get("is_bug") for status in reports)


class SlowFetch:
    """Storage whose read ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end, self.ended = (threading.Event() for _ in range(3))
        self.error: BaseException | None = None
        monkeypatch.setattr(state_fetch, "fetch", self.fetch)
        monkeypatch.setattr(state_fetch, "pieces_needed", lambda *_, **__: {})
        monkeypatch.setattr(state_fetch, "model_of", lambda _: "")
        monkeypatch.setattr(generation, "holdings_for", lambda *_: None)
        monkeypatch.setattr(generation, "check_node", lambda *_: None)
        monkeypatch.setattr(generation, "snapshot_job", lambda *_: SimpleNamespace(zero=0))
        monkeypatch.setattr(generation.torch, "set_num_threads", lambda _: None)

    def fetch(self, *_: Any, check_cancelled: Any, **__: Any) -> None:
        self.begun.set()
        self.may_end.wait()
        try:
            check_cancelled()
        except Exception as error:
            self.error = error
            raise
        finally:
            self.ended.set()


OPENED: Any = SimpleNamespace(job=None, plan=None)


def test_loss_while_ranks_meet_is_reported_before_a_slow_fetch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowFetch(monkeypatch)
    run, reports, broken = told_run(tmp_path)

    def lose():
        slow.begun.wait()
        raise PeerLostError(1, "meeting")

    run._meet = lose
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run.run(lambda _: OPENED)), daemon=True)
    thread.start()
    try:
        assert broken.wait(20)
        assert not slow.ended.is_set()
    finally:
        slow.may_end.set()
    assert slow.ended.wait(20)
    assert isinstance(slow.error, state_fetch.GivenUpError), "nobody waits for the rest"
    run.end()
    thread.join(20)
    assert (ended, reports[-1]["taking"]) == ([True], "idle")


@pytest.mark.parametrize("hangs", [True, False])
def test_ended_generation_waits_for_no_fetch_and_its_process_is_used_again_once_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    slow = SlowFetch(monkeypatch)
    monkeypatch.setattr(state_fetch, "END_S", 0.0 if hangs else 20.0)
    run = run_of(tmp_path, lambda *_: None)
    run._meet = slow.begun.wait
    run._build = lambda *_: None
    fill = StateFetch.fill

    def end_while_it_waits(fetch, copy):
        run.end()
        if not hangs:
            slow.may_end.set()
        return fill(fetch, copy)

    monkeypatch.setattr(StateFetch, "fill", end_while_it_waits)
    try:
        assert run.run(lambda _: OPENED) is not hangs
        assert slow.ended.is_set() is not hangs
    finally:
        slow.may_end.set()
    assert slow.ended.wait(20)


class Body(bytearray):
    """A fetched piece that can be seen to be freed."""


def test_pieces_are_freed_as_they_are_copied(tmp_path: Path, monkeypatch):
    """All of them may be more than the node's memory has room for beside its snapshots."""
    slow = SlowFetch(monkeypatch)
    slow.may_end.set()
    made: list[weakref.ref[Body]] = []
    most, copied = [], []

    def alive() -> int:
        return sum(each() is not None for each in made)

    def fetch_five(*_: Any, into: PieceQueue, **__: Any) -> Any:
        for number in range(5):
            while not into.reserve(60):
                into.wait(1.0)
            body = Body(60)
            made.append(weakref.ref(body))
            most.append(alive())
            into.put((0, number), body, 60)
            del body
        return SimpleNamespace(header=SimpleNamespace(progress=None), problems=())

    monkeypatch.setattr(state_fetch, "fetch", fetch_five)
    monkeypatch.setattr(state_fetch, "HELD_BYTES_MAX", 130)
    monkeypatch.setattr(generation, "load_piece", lambda _, key, __: copied.append(key))
    monkeypatch.setattr(generation, "continue_from", lambda *_: None)
    monkeypatch.setattr(generation, "check_state", lambda _: None)
    run = run_of(tmp_path, lambda *_: None)
    run._meet = run._build = lambda *_: None
    left = []
    run._open_snapshots = lambda *_: left.append(alive())
    run._restore(OPENED)
    assert copied == [(0, number) for number in range(5)]
    assert max(most) <= 2
    assert left == [0]


def test_the_last_status_is_the_newest_whatever_thread_reports(tmp_path: Path, monkeypatch):
    """Another thread seals a snapshot; it may be slow between reading and handing on."""
    reports: list[dict[str, Any]] = []
    run = run_of(tmp_path, lambda status, _: reports.append(status))
    has_read, may_go_on = threading.Event(), threading.Event()
    read = run._status

    def read_slowly() -> dict[str, Any]:
        status = read()
        if threading.current_thread().name == "snapshot":
            has_read.set()
            may_go_on.wait()
        return status

    monkeypatch.setattr(run, "_status", read_slowly)
    seals = threading.Thread(target=run._sealed, args=(3,), name="snapshot")
    fails = threading.Thread(target=run._fail, args=("the data ended",), kwargs={"is_bug": True})
    seals.start()
    has_read.wait()
    fails.start()
    fails.join(0.2)  # It is over by then, or waits for the other thread.
    may_go_on.set()
    seals.join()
    fails.join()
    assert reports[-1]["taking"] == "failed"
