"""All ranks of a plan as processes of this machine: forked, watched, and never left behind.

The parent imports everything and opens nothing, then forks. Each rank lives in a process group of
its own, so that an interrupt from the terminal reaches the parent alone, and dies with the parent,
however that dies. A rank says what it has to say in lines of JSON; the parent hears them, and of
each rank's end at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from simulator.documents.problems import InputError, Problem
from worker.profiling.activity_board import ActivityBoard
from worker.types import ACTIVITIES, Activity

SendMessage = Callable[[dict[str, Any]], None]
"""Sends a message to the parent."""
Body = Callable[[int, SendMessage], None]
"""What a rank does, given its number."""

OnMessage = Callable[[int, dict[str, Any]], None]
"""Takes a message, and the number of the rank that sent it."""

_OTHERS_S = 1.0
"""When one rank has failed, the others get this long to say what they make of it."""
_END_S = 60.0
"""When one rank has ended well, the others must within this time."""
_PR_SET_PDEATHSIG = 1

# Last words of a rank: another failed; it failed itself; it met a mistake of the user's.
_BROKEN, _FAILED, _REFUSED = "broken", "failed", "refused"
_LAST_WORDS = (_BROKEN, _FAILED, _REFUSED)


class Interrupted(BaseException):
    """A signal asked the parent to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class PeerFailedError(Exception):
    """Raised by a rank that cannot go on because another has failed."""


class RunFailedError(Exception):
    """Raised by a rank that cannot go on; the message says all there is to say."""


class RanksFailedError(Exception):
    """A rank failed or was killed; the message says which, in what, and who noticed."""


@dataclass(slots=True)
class _RankProcess:
    """One forked process, as the parent sees it."""

    number: int
    pid: int
    pipe: int
    life: int
    """A file descriptor that becomes readable when the process ends."""
    unread: bytes = b""
    exit_code: int | None = None
    said: dict[str, Any] | None = None
    """Its last words, if it failed: the message of what failed."""
    said_at_s: float = 0.0


def run_ranks(body: Body, *, ranks: int, board: ActivityBoard, hear: OnMessage) -> None:
    """Run ``body`` in a process for each rank, until all have ended well; hear what they say.

    However this ends, no process of it is left.
    """
    crew = _RankProcesses(board, hear)
    with ended_by_signals():
        try:
            crew.fork(body, ranks)
            crew.watch()
        finally:
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)
            crew.end()


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal that asks to end be raised as ``Interrupted``, so that all is tidied up."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        # ``nohup`` has a hang-up ignored, and means it.
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
    """The forked ranks and what is known of them."""

    board: ActivityBoard
    hear: OnMessage
    ranks: list[_RankProcess] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def fork(self, body: Body, count: int) -> None:
        """Start all ranks."""
        parent = os.getpid()
        for number in range(count):
            sys.stdout.flush()
            sys.stderr.flush()
            reading, writing = os.pipe()
            # A signal between the fork and the note of it would leave a process behind.
            signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
            pid = os.fork()
            if pid == 0:
                _live(body, number, writing, parent)
            os.close(writing)
            os.set_blocking(reading, False)
            rank = _RankProcess(number, pid, reading, os.pidfd_open(pid))
            self.ranks.append(rank)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
            self._selector.register(rank.life, selectors.EVENT_READ, rank)

    def watch(self) -> None:
        """Hear the ranks until all have ended well; raise when one has not."""
        deadline: float | None = None
        while any(rank.exit_code is None for rank in self.ranks):
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                rank: _RankProcess = key.data
                self._listen(rank)
                if key.fd == rank.life:
                    self._bury(rank)
            now = time.monotonic()
            if self._is_broken():
                deadline = min(deadline or now + _OTHERS_S, now + _OTHERS_S)
            elif deadline is None and any(rank.exit_code == 0 for rank in self.ranks):
                deadline = now + _END_S
            if deadline is not None and now >= deadline:
                break
        if self._is_broken() or any(rank.exit_code != 0 for rank in self.ranks):
            raise self._failure()

    def _listen(self, rank: _RankProcess) -> None:
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
                if message["kind"] in _LAST_WORDS:
                    rank.said, rank.said_at_s = message, time.monotonic()
                else:
                    self.hear(rank.number, message)

    def _bury(self, rank: _RankProcess) -> None:
        _, status = os.waitpid(rank.pid, 0)
        rank.exit_code = os.waitstatus_to_exitcode(status)
        self._selector.unregister(rank.life)
        if rank.exit_code != 0 and rank.said is None:
            rank.said_at_s = time.monotonic()

    def _is_broken(self) -> bool:
        return any(rank.said is not None or rank.exit_code not in (None, 0) for rank in self.ranks)

    def _failure(self) -> Exception:
        """Tell the cause from what only followed from it."""
        for rank in self.ranks:
            if rank.said is not None and rank.said["kind"] == _REFUSED:
                return InputError([Problem(*each) for each in rank.said["problems"]])
        silent = [r for r in self.ranks if r.said is None and r.exit_code not in (None, 0)]
        own = [r for r in self.ranks if r.said is not None and r.said["kind"] == _FAILED]
        stuck = [r for r in self.ranks if r.said is None and r.exit_code is None]
        broken = [r for r in self.ranks if r.said is not None and r.said["kind"] == _BROKEN]
        causes = silent or own or broken or stuck
        cause = min(causes, key=lambda rank: rank.said_at_s)
        if cause.said is not None and cause.said.get("says_all"):
            return RanksFailedError(cause.said["what"])
        noticed = [r for r in broken if r is not cause]
        return RanksFailedError(f"{self._end_of(cause)}{_noticed(cause, noticed)}")

    def _end_of(self, rank: _RankProcess) -> str:
        step, activity = self.board.read(rank.number)
        where = f"in {_IN_WORDS[activity]} of step {step}"
        if rank.said is not None:
            return f"rank {rank.number} failed {where}: {rank.said['what']}"
        if rank.exit_code is None:
            return f"rank {rank.number} did not end, {where}"
        if rank.exit_code < 0:
            name = signal.Signals(-rank.exit_code).name
            return f"rank {rank.number} was killed by {name} {where}"
        return f"rank {rank.number} ended with code {rank.exit_code} {where}"

    def end(self) -> None:
        """Kill what still runs, and wait until it is gone."""
        for rank in self.ranks:
            if rank.exit_code is None:
                signal.pidfd_send_signal(rank.life, signal.SIGKILL)
        for rank in self.ranks:
            if rank.exit_code is None:
                self._bury(rank)
            os.close(rank.pipe)
            os.close(rank.life)
        self._selector.close()


_IN_WORDS: dict[Activity, str] = {activity: activity for activity in ACTIVITIES} | {
    "start": "the start",
    "data": "reading data",
    "sync": "gradient sync",
    "step": "the optimizer step",
    "vote": "the vote",
    "end": "the end",
}


def _noticed(cause: _RankProcess, others: list[_RankProcess]) -> str:
    if not others:
        return ""
    names = ", ".join(str(rank.number) for rank in others)
    slowest_s = max(0.0, *(rank.said_at_s - cause.said_at_s for rank in others))
    return f"; rank{'s' if len(others) > 1 else ''} {names} noticed within {slowest_s:.2f} s"


# -- in the rank ----------------------------------------------------------------------------------


def _live(body: Body, number: int, writing: int, parent: int) -> NoReturn:
    """Be a rank, from the fork to the end of the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # The parent died before it could take us along.
        # Only the parent decides when to end; a half-done step would help nobody.
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

        def say(message: dict[str, Any]) -> None:
            _write(writing, json.dumps(message).encode() + b"\n")

        code = _run(body, number, say)
    except BrokenPipeError:
        pass  # The parent is going, and we with it.
    finally:
        os._exit(code)


def _run(body: Body, number: int, say: SendMessage) -> int:
    try:
        body(number, say)
    except InputError as error:
        problems = [(each.place, each.what, each.cure) for each in error.problems]
        say({"kind": _REFUSED, "problems": problems})
    except PeerFailedError as failure:
        say({"kind": _BROKEN, "what": str(failure)})
    except RunFailedError as failure:
        say({"kind": _FAILED, "what": str(failure), "says_all": True})
    except BaseException as error:
        # A defect of ours: its trace is for us, the sentence for whoever ran it.
        traceback.print_exc()
        sys.stderr.flush()
        say({"kind": _FAILED, "what": f"{type(error).__name__}: {error}", "says_all": False})
    else:
        sys.stdout.flush()
        return 0
    return 1


def _write(pipe: int, content: bytes) -> None:
    while content:
        content = content[os.write(pipe, content) :]
