"""Copies a rank's state into snapshot files in memory while training continues.

A snapshot is of the state between two steps, which only the next update changes. So the copy has
the time of the next forward and backward pass, and only that update waits for it. Files are made
before training, so that a full memory is noticed early; where what past generations left still
fills it, the second one is made when it is needed, since that can go by then. The file of a point
that is no longer needed is overwritten; to keep it, hold a hard link to it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from worker.checkpoint import snapshot_file
from worker.checkpoint.load_state import flat_states, views_in_buffer, views_in_piece
from worker.forked_process import withhold, withhold_no_more
from worker.layout.rank_layout import piece_layout
from worker.profiling.fault_injection import Milestone
from worker.training.flat_buffers import LayerBuffer

_cuda: Any = torch.cuda  # torch's type stubs leave these untyped.

_REFUSED = 1
"""cudaErrorInvalidValue: what CUDA says of a file that it cannot pin."""
_POLL_S = 0.05
_REPORT_S = 1.0
_CHECKSUM_THREADS_MAX = 4
"""At most so many threads sum up the files of a rank on a GPU, within its share of the cores. One
does 7 GB/s."""
SEAL_BYTES_PER_S = 2e9
"""The rate at which a rank copies and checksums its state, until a snapshot was measured."""

OnMilestone = Callable[[Milestone], None]
"""Called when a milestone of a snapshot is reached."""


@dataclass(eq=False, slots=True)
class _SnapshotSlot:
    """An open and mapped file, with views of its pieces' tensors."""

    file: int
    temporary: Path
    """Its name while it is not sealed."""
    path: Path
    memory: mmap.mmap
    targets: list[Tensor]
    step: int | None = None
    """The step that it holds or will hold."""
    is_pinned: bool = False

    def close(self) -> None:
        """Keep the file if it is sealed, else remove it."""
        if self.path == self.temporary:
            self.temporary.unlink(missing_ok=True)
        self.targets.clear()
        if self.is_pinned:
            unpin(self.memory)
        with suppress(BufferError):  # Views of it still exist and keep it mapped.
            self.memory.close()  # A mapped file takes memory even if it is removed.
        withhold_no_more(self.file)
        os.close(self.file)


class SnapshotCopier:
    """Copies a rank's state into files while training goes on.

    On a GPU it keeps one stream of its own, since torch shares the streams of a pool, and copies
    into pinned memory, since a copy to pageable memory would block its thread.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    def copy(
        self, sources: list[Tensor], targets: list[Tensor], ready: torch.cuda.Event | None
    ) -> None:
        """Copy with one call that releases the GIL; return once it is done."""
        if not sources:
            return  # With ZeRO-1 a rank may keep nothing.
        with torch.no_grad():
            if ready is None:
                torch._foreach_copy_(targets, sources)
                return
            # Otherwise a new thread would use GPU 0, and open a CUDA context there.
            _cuda.set_device(sources[0].device)
            if self._stream is None:
                self._stream = _cuda.Stream(sources[0].device)
            with _cuda.stream(self._stream):
                self._stream.wait_event(ready)
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self._stream.synchronize()


@dataclass(eq=False)
class SnapshotWriter:
    """One rank's snapshot files of one generation."""

    memory: Path
    """The node's folder for snapshots."""
    template: snapshot_file.Header
    """With offsets; step, progress and checksums are set for each snapshot."""
    sources: CopySources
    on_sealed: Callable[[int], None] = lambda _: None
    on_milestone: OnMilestone = lambda _: None
    on_no_room: Callable[[int, int], None] = lambda *_: None
    """Called repeatedly while there is no room for another file, with the needed bytes and the step
    before which points may be overwritten; an error of it ends the wait."""
    room_wait_s: float = 30.0
    """Seconds to wait for room in a full memory."""
    sealed: snapshot_file.Header | None = None
    """The header of the last sealed snapshot."""
    _slots: list[_SnapshotSlot] = field(default_factory=list)
    _made: int = 0
    _begun_s: float = 0.0
    _measured_s: float | None = None
    """How long the last snapshot took, from the start of its copy until it was sealed."""
    _thread: threading.Thread | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None
    _copier: SnapshotCopier = field(default_factory=SnapshotCopier)

    def reserve(self, count: int, more: int = 0) -> None:
        """Make files; ``NoRoomError`` says how many bytes they need. ``more`` are made if there is
        room for them."""
        size = self.template.total_bytes
        try:
            while len(self._slots) < count:
                self._slots.append(self._new_when_room(0))
        except snapshot_file.NoRoomError as error:
            self.close()
            text = f"{count} files at once: {snapshot_file.no_room(self.memory, size * count)}"
            raise snapshot_file.NoRoomError.of(
                error.errno, text, self.memory, size * count
            ) from None
        except BaseException:
            self.close()
            raise
        with suppress(snapshot_file.NoRoomError):
            for _ in range(more):
                self._slots.append(self._new())

    def begin(
        self, progress: snapshot_file.SavedProgress, *, persist: bool, safe_step: int
    ) -> None:
        """Start a copy; points before ``safe_step`` may be overwritten."""
        self.wait_sealed()
        file = self._next_slot(safe_step)
        file.step = progress.step
        header = replace(self.template, step=progress.step, persist=persist, progress=progress)
        ready = _copy_may_start(self.sources.tensors)
        self._begun_s = time.monotonic()
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._copy_and_seal, args=(file, header, ready), name="snapshot", daemon=True
        )
        self._thread.start()

    def wait_copied(self) -> None:
        """Wait until the buffers may change."""
        if self._thread is not None:
            self._copied.wait()
        self._raise_failure()

    def wait_sealed(self) -> None:
        """Wait until the snapshot is sealed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    @property
    def seal_s(self) -> float:
        """The expected seconds of a snapshot: as the last one took, else by its bytes."""
        if self._measured_s is not None:
            return self._measured_s
        return self.template.total_bytes / SEAL_BYTES_PER_S

    @property
    def left_s(self) -> float:
        """The expected seconds until the present snapshot is sealed; 0: there is none."""
        thread = self._thread  # Another thread may end the wait for it meanwhile.
        if thread is None or not thread.is_alive():
            return 0.0
        # One that is overdue is expected to need as long again as it is overdue.
        return abs(self._begun_s + self.seal_s - time.monotonic())

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are sealed or being sealed."""
        return tuple(sorted(file.step for file in self._slots if file.step is not None))

    def withdraw(self) -> None:
        """Remove sealed files as well, since other ranks have contradicted their bits."""
        with suppress(Exception):
            self.wait_sealed()
        for file in self._slots:
            self._reclaim(file)

    def close(self) -> None:
        """Finish the current snapshot; sealed files stay and belong to the agent."""
        with suppress(Exception):  # Each wait during training has raised it before.
            self.wait_sealed()
        for file in self._slots:
            file.close()
        self._slots.clear()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- files ----------------------------------------------------------------------------------

    def _new(self) -> _SnapshotSlot:
        template = self.template
        name = snapshot_file.part_name(template.generation, template.rank, os.getpid(), self._made)
        temporary = self.memory / template.job / name
        self._made += 1
        file = snapshot_file.create(temporary, template.total_bytes)
        memory = mmap.mmap(file, template.total_bytes)
        # Else processes that load samples would keep its memory after we have closed it.
        memory.madvise(mmap.MADV_DONTFORK)
        withhold(file)
        targets = self.sources.targets(memory)
        is_pinned = bool(targets) and self.sources.is_on_gpu and pin(memory)
        return _SnapshotSlot(file, temporary, temporary, memory, targets, is_pinned=is_pinned)

    def _next_slot(self, safe_step: int) -> _SnapshotSlot:
        free = [f for f in self._slots if f.step is None or f.step < safe_step]
        for file in sorted(free, key=lambda file: -1 if file.step is None else file.step):
            if self._reclaim(file):
                return file
            self._slots.remove(file)
            file.close()
        self._slots.append(self._new_when_room(safe_step))
        return self._slots[-1]

    def _new_when_room(self, safe_step: int) -> _SnapshotSlot:
        """Make another file, retrying while the agent may release old ones."""
        now = reported_at = time.monotonic()
        deadline = now + self.room_wait_s
        while True:
            try:
                return self._new()
            except snapshot_file.NoRoomError as error:
                now = time.monotonic()
                if now > deadline:
                    raise
                if now >= reported_at:
                    self.on_no_room(error.needed_bytes, safe_step)
                    reported_at = now + _REPORT_S
                time.sleep(_POLL_S)

    def _reclaim(self, file: _SnapshotSlot) -> bool:
        """Make a file writable again, unless it is linked elsewhere or was removed."""
        if file.path != file.temporary:
            with suppress(FileNotFoundError):
                file.path.rename(file.temporary)
            file.path = file.temporary
        if os.fstat(file.file).st_nlink != 1:
            return False
        snapshot_file.unseal(file.file)
        return True

    # ---- the copy -------------------------------------------------------------------------------

    def _copy_and_seal(
        self, file: _SnapshotSlot, header: snapshot_file.Header, ready: torch.cuda.Event | None
    ) -> None:
        try:
            self.on_milestone("copying")
            self._copier.copy(self.sources.tensors, file.targets, ready)
            self._copied.set()
            self.on_milestone("copied")
            header = replace(header, pieces=self._with_checksums(file.memory, header.pieces))
            self.on_milestone("sealing")
            folder = snapshot_file.point_folder(
                self.memory, header.job, generation=header.generation, step=header.step
            )
            snapshot_file.make_folder(folder)
            snapshot_file.seal(file.file, header)
            file.path = file.temporary.rename(folder / header.file_name)
            self.sealed = header
            self._measured_s = time.monotonic() - self._begun_s
            self.on_milestone("sealed")
            self.on_sealed(header.step)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._copied.set()

    def _with_checksums(
        self, memory: mmap.mmap, pieces: tuple[snapshot_file.Piece, ...]
    ) -> tuple[snapshot_file.Piece, ...]:
        threads = 1
        if self.sources.is_on_gpu:
            share = len(os.sched_getaffinity(0)) // max(torch.cuda.device_count(), 1)
            threads = max(1, min(_CHECKSUM_THREADS_MAX, share))
        moments = self.template.moments
        with memoryview(memory) as body, ThreadPoolExecutor(threads) as pool:

            def summed(piece: snapshot_file.Piece) -> snapshot_file.Piece:
                begin, end = piece.offset, piece.offset + piece.bytes
                middle = begin + piece.bytes // (1 + moments)
                with body[begin:middle] as weights, body[middle:end] as rest:
                    total = xxhash.xxh3_128(weights)
                    of_weights = total.hexdigest() if piece.weights_checksum else ""
                    total.update(rest)
                    return replace(piece, checksum=total.hexdigest(), weights_checksum=of_weights)

            return tuple(pool.map(summed, pieces))


@dataclass(frozen=True, slots=True)
class CopySources:
    """The tensors that a rank copies, as views of its buffers."""

    pieces: tuple[tuple[snapshot_file.Piece, LayerBuffer], ...]
    tensors: list[Tensor]

    @property
    def is_on_gpu(self) -> bool:
        """Whether copies come from a GPU."""
        return bool(self.tensors) and self.tensors[0].device.type == "cuda"

    @classmethod
    def of(cls, header: snapshot_file.Header, buffers: Mapping[int, LayerBuffer]) -> CopySources:
        """Collect all non-empty pieces of a header."""
        last = header.layers - 1
        pieces = tuple(
            (piece, buffers[snapshot_file.layer_from_number(piece.layer, layers=last)])
            for piece in header.pieces
            if piece.bytes
        )
        tensors = [
            view.detach()
            for piece, buffer in pieces
            for flat in flat_states(buffer)
            for view in views_in_buffer(buffer, flat, piece.piece)
        ]
        return cls(pieces, tensors)

    def targets(self, body: mmap.mmap) -> list[Tensor]:
        """Return the views in a file that the tensors are copied to."""
        found = []
        for piece, buffer in self.pieces:
            elements = piece_layout(buffer.specs, piece.piece, atoms=buffer.atoms).elements
            for kind in range(len(flat_states(buffer))):
                offset = piece.offset + kind * elements * buffer.master.element_size()
                flat = torch.frombuffer(
                    body, dtype=buffer.master.dtype, count=elements, offset=offset
                )
                found += views_in_piece(buffer, flat, piece.piece)
        return found


def pin(body: mmap.mmap) -> bool:
    """Pin a mapped file for copies from a GPU; else they are slower and block a thread."""
    failed = int(_cuda.cudart().cudaHostRegister(_address(body), len(body), 0))
    if failed:
        # CUDA repeats a failed call's error to the next launch that looks, which would be a step's.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        cure = "; a folder on tmpfs such as /dev/shm can be pinned" if failed == _REFUSED else ""
        print(
            f"snapshots: memory is not pinned (CUDA error {failed}), copies are slower{cure}",
            flush=True,
        )
    return not failed


def unpin(body: mmap.mmap) -> None:
    """Undo ``pin``, before the file is unmapped."""
    _cuda.cudart().cudaHostUnregister(_address(body))


def _address(body: mmap.mmap) -> int:
    return torch.frombuffer(body, dtype=torch.uint8, count=1).data_ptr()


def _copy_may_start(sources: list[Tensor]) -> torch.cuda.Event | None:
    """Record a CUDA event that the copy waits for."""
    if not sources or sources[0].device.type != "cuda":
        return None
    event: torch.cuda.Event = _cuda.Event()
    event.record(torch.cuda.current_stream(sources[0].device))
    return event
