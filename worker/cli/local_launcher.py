"""Runs all ranks of a plan as forked processes of this machine, and never leaves one behind.

The parent imports everything and opens nothing, then forks. Each rank has its own process group, so
that an interrupt from the terminal reaches the parent alone, and is killed when the parent dies.
Ranks send JSON lines to the parent, which also notices their exits at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, TypeVar

from simulator.documents.problems import InputError, Problem
from worker.forked_process import end_with_parent
from worker.profiling.activity_board import ActivityBoard
from worker.script.script_error import print_script_traceback, sentence
from worker.types import ACTIVITIES, Activity

T = TypeVar("T")

SendMessage = Callable[[dict[str, Any]], None]
"""Sends a message to the parent."""
RankBody = Callable[[int, SendMessage], None]
"""What a rank runs, given its number."""

OnMessage = Callable[[int, dict[str, Any]], None]
"""Handles a message of a rank."""

_REPORT_S = 1.0
"""Seconds for the other ranks to report after one has failed."""
_EXIT_S = 60.0
"""Seconds for the other ranks to exit after one has exited successfully."""

# The last message of a rank: a peer failed, it failed itself, or the input was wrong.
_BROKEN, _FAILED, _REFUSED = "broken", "failed", "refused"
_LAST_MESSAGES = (_BROKEN, _FAILED, _REFUSED)


class Interrupted(BaseException):
    """The parent received a termination signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class PeerFailedError(Exception):
    """Raised by a rank that cannot continue because another one failed."""


class RunFailedError(Exception):
    """Raised by a rank that cannot continue; the message is complete."""


class RanksFailedError(Exception):
    """A rank failed or was killed; the message says which, during what, and which ranks noticed."""


@dataclass(slots=True)
class _RankProcess:
    """One forked process, as the parent sees it."""

    number: int
    pid: int
    pipe: int
    pidfd: int
    """A pidfd, readable when the process has exited."""
    unread: bytes = b""
    exit_code: int | None = None
    last_message: dict[str, Any] | None = None
    """Its last message, if it failed."""
    ended_at_s: float = 0.0

    @property
    def ended_as(self) -> str | None:
        """The kind of its last message; ``None``: it has sent none."""
        return None if self.last_message is None else str(self.last_message["kind"])


def run_ranks(body: RankBody, *, ranks: int, board: ActivityBoard, on_message: OnMessage) -> None:
    """Run ``body`` in one process per rank until all have exited; pass on their messages.

    Whatever happens, no process is left behind.
    """
    processes = _RankProcesses(board, on_message)
    with ended_by_signals():
        try:
            processes.fork(body, ranks)
            processes.wait_all()
        finally:
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)
            processes.kill_all()


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def in_fork(act: Callable[[], T]) -> T:
    """Return what ``act`` returns in a forked process, with which its threads and memory end."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def run() -> None:
        try:
            found = act()
        except InputError as error:
            writing.send((None, error.problems))
        else:
            writing.send((found, ()))

    process = context.Process(target=run, daemon=True)
    process.start()
    writing.close()
    try:
        found, problems = reading.recv()
    except EOFError:
        process.join()
        what = f"ended its process, with exit code {process.exitcode}"
        raise InputError(Problem("the script", what, "run it with python to debug it")) from None
    if problems:
        raise InputError(problems)
    value: T = found
    return value


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise ``Interrupted`` on termination signals, so that everything is cleaned up."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        # ``nohup`` has SIGHUP ignored.
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise Interrupted(number)


@dataclass(slots=True)
class _RankProcesses:
    """The forked ranks and their state."""

    board: ActivityBoard
    on_message: OnMessage
    ranks: list[_RankProcess] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def fork(self, body: RankBody, count: int) -> None:
        """Start all ranks."""
        parent = os.getpid()
        for number in range(count):
            sys.stdout.flush()
            sys.stderr.flush()
            reading, writing = os.pipe()
            # A signal between the fork and its record would leave a process behind.
            signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
            pid = os.fork()
            if pid == 0:
                _run_rank(body, number, writing, parent)
            os.close(writing)
            os.set_blocking(reading, False)
            rank = _RankProcess(number, pid, reading, os.pidfd_open(pid))
            self.ranks.append(rank)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def wait_all(self) -> None:
        """Receive messages until all ranks have exited; raise if one failed."""
        deadline: float | None = None
        while any(rank.exit_code is None for rank in self.ranks):
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                rank: _RankProcess = key.data
                self._read_messages(rank)
                if key.fd == rank.pidfd:
                    self._reap(rank)
            now = time.monotonic()
            if self._is_broken():
                deadline = min(deadline or now + _REPORT_S, now + _REPORT_S)
            elif deadline is None and any(rank.exit_code == 0 for rank in self.ranks):
                deadline = now + _EXIT_S
            if deadline is not None and now >= deadline:
                break
        if self._is_broken() or any(rank.exit_code != 0 for rank in self.ranks):
            raise self._failure()

    def _read_messages(self, rank: _RankProcess) -> None:
        while True:
            try:
                portion = os.read(rank.pipe, 2**16)
            except BlockingIOError:
                break
            if not portion:
                if rank.pipe in self._selector.get_map():
                    self._selector.unregister(rank.pipe)
                break
            *lines, rank.unread = (rank.unread + portion).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["kind"] in _LAST_MESSAGES:
                    rank.last_message, rank.ended_at_s = message, time.monotonic()
                else:
                    self.on_message(rank.number, message)

    def _reap(self, rank: _RankProcess) -> None:
        _, status = os.waitpid(rank.pid, 0)
        rank.exit_code = os.waitstatus_to_exitcode(status)
        self._selector.unregister(rank.pidfd)
        if rank.exit_code != 0 and rank.last_message is None:
            rank.ended_at_s = time.monotonic()

    def _is_broken(self) -> bool:
        return any(rank.last_message or rank.exit_code not in (None, 0) for rank in self.ranks)

    def _failure(self) -> Exception:
        """Distinguish the cause from its consequences."""
        for rank in self.ranks:
            if rank.last_message is not None and rank.ended_as == _REFUSED:
                return InputError([Problem(*each) for each in rank.last_message["problems"]])
        silent = [r for r in self.ranks if r.ended_as is None and r.exit_code not in (None, 0)]
        own = [r for r in self.ranks if r.ended_as == _FAILED]
        stuck = [r for r in self.ranks if r.ended_as is None and r.exit_code is None]
        broken = [r for r in self.ranks if r.ended_as == _BROKEN]
        causes = silent or own or broken or stuck
        cause = min(causes, key=lambda rank: rank.ended_at_s)
        if cause.last_message is not None and cause.last_message.get("says_all"):
            return RanksFailedError(cause.last_message["what"])
        noticed = [r for r in broken if r is not cause]
        return RanksFailedError(
            f"{self._describe_end(cause)}{_describe_who_noticed(cause, noticed)}"
        )

    def _describe_end(self, rank: _RankProcess) -> str:
        step, activity = self.board.read(rank.number)
        where = f"in {_IN_WORDS[activity]} of step {step}"
        if rank.last_message is not None:
            return f"rank {rank.number} failed {where}: {rank.last_message['what']}"
        if rank.exit_code is None:
            return f"rank {rank.number} did not exit, {where}"
        if rank.exit_code < 0:
            name = signal.Signals(-rank.exit_code).name
            return f"rank {rank.number} was killed by {name} {where}"
        return f"rank {rank.number} ended with code {rank.exit_code} {where}"

    def kill_all(self) -> None:
        """Kill the remaining ranks and wait for them."""
        for rank in self.ranks:
            if rank.exit_code is None:
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        for rank in self.ranks:
            if rank.exit_code is None:
                self._reap(rank)
            os.close(rank.pipe)
            os.close(rank.pidfd)
        self._selector.close()


_IN_WORDS: dict[Activity, str] = {activity: activity for activity in ACTIVITIES} | {
    "start": "the start",
    "data": "reading data",
    "sync": "gradient sync",
    "step": "the optimizer step",
    "snapshot": "the wait for a snapshot",
    "vote": "the vote",
    "end": "the end",
}


def _describe_who_noticed(cause: _RankProcess, others: list[_RankProcess]) -> str:
    if not others:
        return ""
    names = ", ".join(str(rank.number) for rank in others)
    slowest_s = max(0.0, *(rank.ended_at_s - cause.ended_at_s for rank in others))
    return f"; rank{'s' if len(others) > 1 else ''} {names} noticed within {slowest_s:.2f} s"


# -- in the rank's process -------------------------------------------------------------------------


def _run_rank(body: RankBody, number: int, writing: int, parent: int) -> NoReturn:
    """Run a rank from the fork to the exit of the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(parent, ignored=_ENDING)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

        def send(message: dict[str, Any]) -> None:
            content = json.dumps(message).encode() + b"\n"
            while content:
                content = content[os.write(writing, content) :]

        code = _run_body(body, number, send)
    except BrokenPipeError:
        pass  # The parent has exited.
    finally:
        os._exit(code)


def _run_body(body: RankBody, number: int, send: SendMessage) -> int:
    try:
        body(number, send)
    except InputError as error:
        problems = [(each.place, each.what, each.cure) for each in error.problems]
        send({"kind": _REFUSED, "problems": problems})
    except PeerFailedError as failure:
        send({"kind": _BROKEN, "what": str(failure)})
    except RunFailedError as failure:
        send({"kind": _FAILED, "what": str(failure), "says_all": True})
    except BaseException as error:
        # A bug of a script or of ours: print the trace, send one sentence.
        print_script_traceback(error)
        send({"kind": _FAILED, "what": sentence(error), "says_all": False})
    else:
        sys.stdout.flush()
        return 0
    return 1
