"""Loads micro batches in processes of their own, where one thread is too slow.

The processes are those of torch's ``DataLoader``: forked, so that a script's data set needs no
pickling, and each with a part of the micro batches, which come back in the order of use. What is
drawn at random depends on the sample alone, so a batch does not depend on who loaded it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from simulator.documents.problems import InputError, Problem
from worker.data.batch import DataSource, Samples
from worker.forked_process import end_with_parent, is_withheld

Micro = tuple[int, range]
"""A micro batch: the step, and the positions of its samples in the step's batch."""


class LoaderProcesses:
    """A source that is asked for micro batches one after the other."""

    def __init__(
        self, source: DataSource, following: Callable[[Micro], Micro | None], processes: int
    ) -> None:
        """``following`` returns the micro batch after one, if there is one."""
        self._source, self._following, self._processes = source, following, processes
        self._next: Micro | None = None
        self._running: Iterator[Samples | str] | None = None

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return a micro batch; others than the expected one start the processes anew."""
        assert isinstance(positions, range), "a rank's micro batches are ranges"
        if self._processes == 0:
            return self._source.batch(step, positions)
        micro = (step, positions)
        try:
            if self._running is None or micro != self._next:
                self.close()
                self._running = self._start(micro)
            self._next = self._following(micro)
            found = next(self._running)
        except (RuntimeError, OSError, EOFError) as error:
            # A process could not be started, was killed, or died in the middle of its answer.
            self.close()
            what = f"cannot be loaded by {self._processes} processes: {_sentence(error)}"
            cure = "give a smaller num_workers if memory is short, or 0 to load in a thread"
            raise InputError(Problem("data", what, cure)) from None
        if isinstance(found, str):
            # An error of the data is raised here, too, where its traceback can be shown.
            self.close()
            loaded = self._source.batch(step, positions)
            self._processes = 0
            print(f"note: samples are loaded in a thread; processes cannot: {found}", flush=True)
            return loaded
        return found

    def close(self) -> None:
        """End the processes."""
        self._next = None
        running, self._running = self._running, None
        if running is None:
            return
        ending: Any = running
        ending._shutdown_workers()
        for each in ending._workers:
            each.kill()  # One that hangs in its data is waited for in vain.
            each.join(5)

    def _start(self, first: Micro) -> Iterator[Samples | str]:
        parent = os.getpid()
        loader: DataLoader[Samples | str] = DataLoader(
            _Tried(self._source),  # type: ignore[arg-type]  # torch asks for no more than items
            batch_size=None,
            sampler=_Order(first, self._following),
            num_workers=self._processes,
            collate_fn=_return_unchanged,
            multiprocessing_context="fork",
            worker_init_fn=lambda _: _begin_process(parent),
            # torch draws a seed for its processes; it must not be one of the script's numbers.
            generator=torch.Generator(),
        )
        return iter(loader)


@dataclass(frozen=True, slots=True)
class _Order:
    """The micro batches from one on."""

    first: Micro
    following: Callable[[Micro], Micro | None]

    def __iter__(self) -> Iterator[Micro]:
        micro: Micro | None = self.first
        while micro is not None:
            yield micro
            micro = self.following(micro)


@dataclass(frozen=True, slots=True)
class _Tried:
    """The source as a data set of micro batches; an error's text for one that cannot be loaded."""

    source: DataSource

    def __getitem__(self, micro: Micro) -> Samples | str:
        try:
            samples = self.source.batch(*micro)
            _Sent(io.BytesIO()).dump(samples)
            return samples
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class _Sent(ForkingPickler):
    """The pickler of the processes' queue, whose thread drops what it cannot pickle and goes on.

    Values that can always be pickled, and may be large, are not tried.
    """

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.UntypedStorage):
            return "storage"  # Pickling it would share its memory, and no process fetches a trial.
        if type(value) is Tensor and value.is_leaf and value.layout is torch.strided:
            return "tensor"
        return "array" if type(value) is np.ndarray and not value.dtype.hasobject else None


def _return_unchanged(samples: Any) -> Any:
    return samples


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in {errno.EAGAIN, errno.ENOMEM}:
        return str(error.strerror)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return said if isinstance(error, RuntimeError) else "one of them has ended"


def _begin_process(parent: int) -> None:
    """Make a forked process one that only loads."""
    end_with_parent(parent, ignored=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    _part_with_files()


def _part_with_files() -> None:
    """Share no connection and no place in a file with the parent and its other processes.

    A connection ends when the parent closes it, which peers wait for. A file that the parent has
    opened for reading would be read from where another process has gone to. A snapshot would take
    memory after the parent has closed it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            _part_with(int(name), nothing)
        except OSError:
            continue
    os.close(nothing)


def _part_with(fd: int, nothing: int) -> None:
    about = os.fstat(fd)
    if stat.S_ISSOCK(about.st_mode) or is_withheld(about):
        os.dup2(nothing, fd, inheritable=False)
    elif (
        stat.S_ISREG(about.st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    ):
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, fd, inheritable=False)
        os.close(own)
