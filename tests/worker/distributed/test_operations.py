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
