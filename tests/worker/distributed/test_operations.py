"""The log of one rank's operations, which several threads read."""

from __future__ import annotations

import threading
import weakref

from worker.distributed.operations import OperationLog


class Work:
    """An operation's handle; asked whether it is over, it lets another thread ask the log first."""

    def __init__(self, *, is_over: bool) -> None:
        self.is_over = is_over
        self.meanwhile: threading.Thread | None = None

    def is_completed(self) -> bool:
        other, self.meanwhile = self.meanwhile, None
        if other is not None:
            other.start()
            other.join(0.2)  # It waits for us if it may not read at the same time.
        return self.is_over


def test_two_threads_that_look_for_the_oldest_operation_lose_none():
    log = OperationLog(keeps_unfinished=True)
    over, waits = log.begin("all", "gradients"), log.begin("all", "norm")
    over.work, waits.work = Work(is_over=True), Work(is_over=False)
    seen = []
    other = threading.Thread(target=lambda: seen.append(log.oldest()))
    over.work.meanwhile = other
    seen.append(log.oldest())
    other.join()
    assert [found is not None and found[0] for found in seen] == [waits, waits]


def test_finished_operations_do_not_keep_their_tensors():
    """NCCL's handle of an operation holds the tensors that it worked on."""
    log, handles = OperationLog(keeps_unfinished=True), weakref.WeakSet()
    for _ in range(50):
        operation = log.begin("all", "gradients")
        operation.work = Work(is_over=True)
        handles.add(operation.work)
        del operation
        assert len(handles) <= 1
    first = log.begin("all", "norm")
    first.work = Work(is_over=False)
    log.begin("all", "gradients")
    found = log.oldest()
    assert found is not None
    assert found[0] is first, "what is not over is kept"


def test_receive_that_was_requested_early_keeps_no_tensors_of_other_groups():
    """It may wait while the device runs what was started later, in another communicator."""
    log, handles = OperationLog(keeps_unfinished=True), weakref.WeakSet()
    log.begin("1 to 0", "receiving", is_transfer=True).work = Work(is_over=False)
    for _ in range(50):
        operation = log.begin("0-1", "sum")
        operation.work = Work(is_over=True)
        handles.add(operation.work)
        del operation
        assert len(handles) <= 1


def test_wait_for_an_operation_begins_when_the_one_before_it_ends():
    now = [0.0]
    log = OperationLog(keeps_unfinished=True, now=lambda: now[0])
    started = []
    for group in ("1 to 0", "0-1", "0-1", "1 to 0"):
        started.append(log.begin(group, "something"))
        started[-1].work = Work(is_over=False)
        now[0] += 1

    def end(*numbers):
        now[0] += 10
        for number in numbers:
            started[number].work.is_over = True
        return log.oldest()

    assert log.oldest() == (started[0], 4.0)
    assert end(1) == (started[0], 14.0)
    assert end(0) == (started[2], 0.0), "the host had started it long before the device reached it"
    now[0] += 5
    assert log.oldest() == (started[2], 5.0)
    assert end(2) == (started[3], 0.0)
    assert end(3) is None
