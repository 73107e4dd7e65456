"""Copies a rank's state into files in memory while training goes on.

A snapshot is of the moment between two steps, and what it copies is changed by the next update
only: the copy has all of the next forward and backward pass, and just that update waits for it.
Files are made before training, as many as are ever needed at once, so that a full memory is
noticed before anything depends on it. The file of a point that nobody needs any more is written
over; whoever wants to keep it nevertheless holds a link of its own to it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.load_state import flat_states, piece_layout, views_in_buffer, views_in_piece
from worker.checkpoint.snapshot_file import (
    Header,
    NoRoomError,
    Piece,
    SavedProgress,
    checksum,
    create,
    layer_from_number,
    no_room,
    part_name,
    point_folder,
    seal,
    unseal,
)
from worker.profiling.fault_injection import Milestone
from worker.training.flat_buffers import LayerBuffer

_cuda: Any = torch.cuda  # Its own type stubs leave these untyped.

_LOOK_S = 0.05
_TELL_S = 1.0

OnMilestone = Callable[[Milestone], None]
"""Told when a named place in the course of a snapshot is reached."""


@dataclass(eq=False, slots=True)
class _SnapshotSlot:
    """A file, open and mapped, and where its pieces' tensors are in it."""

    file: int
    early: Path
    """What it is called while it is not sealed."""
    path: Path
    memory: mmap.mmap
    targets: list[Tensor]
    step: int | None = None
    """Of the point that it holds, or is to hold."""

    def close(self) -> None:
        """Leave what is sealed where it is, and remove what is not."""
        if self.path == self.early:
            self.early.unlink(missing_ok=True)
        self.targets.clear()
        with suppress(BufferError):  # Somebody looks at it still; it goes with them.
            self.memory.close()  # Until then the file takes memory, whoever has removed it.
        os.close(self.file)


@dataclass(eq=False)
class SnapshotWriter:
    """One rank's files of one generation."""

    memory: Path
    """The node's folder for snapshots."""
    template: Header
    """Laid out; step, progress and checksums are of each snapshot its own."""
    sources: CopySources
    on_sealed: Callable[[int], None] = lambda _: None
    reached: OnMilestone = lambda _: None
    on_short: Callable[[int], None] = lambda _: None
    """Told, again and again, how many bytes another file needs, while there is no room for it."""
    patience_s: float = 30.0
    """For a full memory to have room again, once training has begun."""
    sealed: Header | None = None
    """The last that is."""
    _files: list[_SnapshotSlot] = field(default_factory=list)
    _made: int = 0
    _thread: threading.Thread | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def reserve(self, count: int) -> None:
        """Make the files that are needed; ``NoRoomError`` says how much they need."""
        size = self.template.total_bytes
        try:
            while len(self._files) < count:
                self._files.append(self._new())
        except NoRoomError as error:
            self.close()
            text = f"{count} of them at once; {no_room(self.memory, size * count)}"
            raise NoRoomError.of(error.errno, text, self.memory, size * count) from None

    def begin(self, progress: SavedProgress, *, persist: bool, safe_step: int) -> None:
        """Start copying; points before ``safe_step`` are not needed any more."""
        self.wait_sealed()
        file = self._take(safe_step)
        file.step = progress.step
        header = replace(self.template, step=progress.step, persist=persist, progress=progress)
        ready = _device_is_here(self.sources.tensors)
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._write, args=(file, header, ready), name="snapshot", daemon=True
        )
        self._thread.start()

    def wait_copied(self) -> None:
        """Return when memory may change."""
        if self._thread is not None:
            self._copied.wait()
        self._raise_failure()

    def wait_sealed(self) -> None:
        """Return when what was begun is sealed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    @property
    def steps(self) -> tuple[int, ...]:
        """The points that are sealed or being so."""
        return tuple(sorted(file.step for file in self._files if file.step is not None))

    def close(self) -> None:
        """Finish what is being written; sealed files stay, and are the agent's."""
        with suppress(OSError):
            self.wait_sealed()
        for file in self._files:
            file.close()
        self._files.clear()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- files ----------------------------------------------------------------------------------

    def _new(self) -> _SnapshotSlot:
        template = self.template
        name = part_name(template.generation, template.rank, os.getpid(), self._made)
        early = self.memory / template.job / name
        self._made += 1
        file = create(early, template.total_bytes)
        memory = mmap.mmap(file, template.total_bytes)
        return _SnapshotSlot(file, early, early, memory, self.sources.targets(memory))

    def _take(self, safe_step: int) -> _SnapshotSlot:
        free = [f for f in self._files if f.step is None or f.step < safe_step]
        for file in sorted(free, key=lambda file: -1 if file.step is None else file.step):
            if self._is_taken_back(file):
                return file
            self._files.remove(file)
            file.close()
        self._files.append(self._new_soon())
        return self._files[-1]

    def _new_soon(self) -> _SnapshotSlot:
        """Make one more, perhaps when those that keep others have let them go."""
        now = told_at = time.monotonic()
        deadline = now + self.patience_s
        while True:
            try:
                return self._new()
            except NoRoomError as error:
                now = time.monotonic()
                if now > deadline:
                    raise
                if now >= told_at:
                    self.on_short(error.needed_bytes)
                    told_at = now + _TELL_S
                time.sleep(_LOOK_S)

    def _is_taken_back(self, file: _SnapshotSlot) -> bool:
        """Make a file our own again, unless somebody keeps it or has removed it."""
        if file.path != file.early:
            with suppress(FileNotFoundError):
                file.path.rename(file.early)
            file.path = file.early
        if os.fstat(file.file).st_nlink != 1:
            return False
        unseal(file.file)
        return True

    # ---- the copy -------------------------------------------------------------------------------

    def _write(self, file: _SnapshotSlot, header: Header, ready: torch.cuda.Event | None) -> None:
        try:
            self.reached("copying")
            _copy(self.sources.tensors, file.targets, ready)
            self._copied.set()
            self.reached("copied")
            with memoryview(file.memory) as body:
                pieces = tuple(
                    replace(p, checksum=checksum(body[p.offset : p.offset + p.bytes]))
                    for p in header.pieces
                )
            header = replace(header, pieces=pieces)
            self.reached("sealing")
            folder = point_folder(
                self.memory, header.job, generation=header.generation, step=header.step
            )
            folder.mkdir(exist_ok=True)
            seal(file.file, header)
            file.path = file.early.rename(folder / header.file_name)
            self.sealed = header
            self.reached("sealed")
            self.on_sealed(header.step)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._copied.set()


@dataclass(frozen=True, slots=True)
class CopySources:
    """What is copied: the pieces that a rank keeps, as they lie in its memory."""

    pieces: tuple[tuple[Piece, LayerBuffer], ...]
    tensors: list[Tensor]

    @classmethod
    def of(cls, header: Header, buffers: Mapping[int, LayerBuffer]) -> CopySources:
        """All pieces of a header in which there is something."""
        last = header.layers - 1
        pieces = tuple(
            (piece, buffers[layer_from_number(piece.layer, layers=last)])
            for piece in header.pieces
            if piece.bytes
        )
        tensors = [
            view.detach()
            for piece, memory in pieces
            for flat in flat_states(memory)
            for view in views_in_buffer(memory, flat, piece.piece)
        ]
        return cls(pieces, tensors)

    def targets(self, body: mmap.mmap) -> list[Tensor]:
        """Where in a file each of the tensors is copied to."""
        found = []
        for piece, memory in self.pieces:
            elements = piece_layout(memory, piece.piece).elements
            for kind in range(len(flat_states(memory))):
                offset = piece.offset + kind * elements * memory.master.element_size()
                flat = torch.frombuffer(
                    body, dtype=memory.master.dtype, count=elements, offset=offset
                )
                found += views_in_piece(memory, flat, piece.piece)
        return found


def _copy(sources: list[Tensor], targets: list[Tensor], ready: torch.cuda.Event | None) -> None:
    """Copy with one call, during which other threads of the interpreter go on."""
    if not sources:
        return  # With ZeRO-1 a rank may keep nothing.
    with torch.no_grad():
        if ready is None:
            torch._foreach_copy_(targets, sources)
            return
        stream: torch.cuda.Stream = _cuda.Stream(sources[0].device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            torch._foreach_copy_(targets, sources, non_blocking=True)
        stream.synchronize()


def _device_is_here(sources: list[Tensor]) -> torch.cuda.Event | None:
    """On an accelerator: what was done to the sources until now is to be done first."""
    if not sources or sources[0].device.type != "cuda":
        return None
    event: torch.cuda.Event = _cuda.Event()
    event.record(torch.cuda.current_stream(sources[0].device))
    return event
