"""Opens the checkpoint of ``--resume``, before any rank starts.

It is given as a manifest, as the folder of one point (GENERATION-STEP), or as a job's folder, whose
newest checkpoint is taken. Every checksum is verified; if one fails, the error names the next older
intact checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.checkpoint.by_tensor.saved_state import SavedCheckpoint, open_saved_state
from worker.checkpoint.compatibility import differences
from worker.checkpoint.load_state import progress_from
from worker.checkpoint.manifest import PREFIX, older
from worker.checkpoint.snapshot_file import point_of
from worker.training.full_tensors import StateKind, TensorKey
from worker.training.trainer import TrainingProgress

OPTION = "--resume"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state that a run continues from, as full tensors."""

    logical: Mapping[TensorKey, Tensor]
    progress: TrainingProgress


def open_resume_point(uri: str, job: Job) -> ResumePoint:
    """Read a checkpoint for a job; ``InputError`` says why the job cannot continue from it."""
    place = _place_of(uri)
    named = _requested_manifest(place, uri)
    try:
        state = open_saved_state(named)
    except InputError as error:
        cure, folder = _name_older_intact(place, named), named.rpartition("/")[0]
        # The place is added unless the text has it.
        texts = (p.what if folder in p.what else f"{p.place}: {p.what}" for p in error.problems)
        raise InputError([Problem(OPTION, text, cure) for text in texts]) from None
    found = differences(job, state.job, step=state.progress.step, place=OPTION)
    if found:
        raise InputError(found)
    return ResumePoint(_read_full_tensors(state), progress_from(state.progress))


def _read_full_tensors(state: SavedCheckpoint) -> dict[TensorKey, Tensor]:
    kinds: tuple[StateKind, ...] = ("master", *(f"moment {i}" for i in state.kinds[:-1]))
    return {
        (layer, spec.name, kind): state.tensor((index, spec.name), number)
        for number, kind in enumerate(kinds)
        for (index, _), (layer, spec) in state.pieces.specs.items()
    }


# ---- checkpoint folders --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CheckpointFolder:
    """A job's checkpoint folder and the requested point."""

    files: Any
    root: str
    uri: str
    """The same folder, as given by the user."""
    point: tuple[int, int] | None
    manifest: str | None

    def manifests(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Yield the job's manifests by generation and step, newest first."""
        found = []
        for path in self.files.find(self.root):
            parts = path.rpartition(self.root)[2].strip("/").split("/")
            if len(parts) == 2 and parts[1].startswith(PREFIX):
                point = point_of(parts[0])
                if point is not None:
                    found.append((point, f"{self.uri}/{'/'.join(parts)}"))
        yield from sorted(found, reverse=True)


def _place_of(uri: str) -> _CheckpointFolder:
    text = uri.rstrip("/") if "://" in uri else f"file://{Path(uri).absolute()}"
    base, _, last = text.rpartition("/")
    manifest = last if last.startswith(PREFIX) else None
    if manifest is not None:
        base, _, last = base.rpartition("/")
    point = point_of(last)
    if manifest is None and point is None:
        base = text  # It is a job's folder.
    try:
        files, root = fsspec.core.url_to_fs(base)
    except Exception as error:  # Storage backends raise any exception.
        what = f"{uri}: {error or type(error).__name__}"
        raise InputError(Problem(OPTION, what, _FORMS)) from None
    return _CheckpointFolder(files, root.rstrip("/"), base, point, manifest and f"{text}")


_FORMS = "give a manifest, or the folder of a point or of a job: gs://, s3:// or a path"


def _requested_manifest(place: _CheckpointFolder, uri: str) -> str:
    """Return the requested manifest."""
    if place.manifest is not None:
        return place.manifest
    try:
        known = list(place.manifests())
    except Exception as error:  # Storage backends raise any exception.
        what = f"{uri} cannot be read: {error or type(error).__name__}"
        raise InputError(Problem(OPTION, what, _FORMS)) from None
    matching = [name for point, name in known if place.point in {None, point}]
    if not matching:
        there = ", ".join(f"{g}-{s}" for (g, s), _ in known[:5])
        cure = f"there are: {there}" if there else _FORMS
        raise InputError(Problem(OPTION, f"{uri} holds no checkpoint", cure))
    return matching[0]


def _name_older_intact(place: _CheckpointFolder, named: str) -> str:
    """Name the next older checkpoint that is intact."""
    try:
        for _, name in older(place.manifests(), point_of(named.split("/")[-2])):
            with suppress(InputError):
                open_saved_state(name)
                return f"the next older intact one is {name}"
    except Exception as error:  # Storage backends raise any exception.
        return f"older ones cannot be listed: {error or type(error).__name__}"
    return "no older one is intact"
