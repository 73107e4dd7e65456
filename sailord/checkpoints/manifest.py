"""The manifest of a checkpoint: which objects hold it, and everything to read them by.

It is JSON and holds its own hash, so that one which was cut short or changed is known for that
without anything else. It stands beside its objects in ``<uri>/<job>/<generation>-<step>/``, and
holds the job's file, so that a checkpoint can be read where nothing else is left.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Durable, Holding, JobId, Point
from sailord.checkpoints.object_storage import Storage
from worker.checkpoint.snapshot_file import SavedProgress

FORMAT = 1
PREFIX = "manifest-"


@dataclass(frozen=True, slots=True)
class Object:
    """One object and the pieces that it is read for."""

    name: str
    """Beside the manifest."""
    bytes: int
    checksum: str
    """Of its header, in which stand the checksums of its pieces."""
    holds: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor; ``layer`` is the last one's number plus one for what layers share."""

    layer: int
    name: str
    shape: tuple[int, ...]
    split_dim: int | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint, or one that was about to be."""

    job: JobId
    point: Point
    term: int
    plan: str
    model: str
    """The fingerprint of the model: another one cannot be filled from these bytes."""
    layers: int
    atoms: int
    """Into how many atoms each tensor that is cut is cut (G); pieces are one more."""
    dtype: str
    moments: int
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    progress: SavedProgress
    spec: str
    """The job's file."""
    parent: Durable | None = None
    format: int = FORMAT
    sha256: str = ""
    """Of this manifest with nothing in this place."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.objects)


class ManifestError(ValueError):
    """What stands there is no manifest, or not as it was written."""


def folder_of(job: JobId, point: Point) -> str:
    """Where a checkpoint's objects and manifests stand, below the place for checkpoints."""
    return f"{job}/{point.generation}-{point.step}"


def manifest_name(job: JobId, point: Point, term: int) -> str:
    """A name that nobody else ever writes: each leader has its own."""
    return f"{folder_of(job, point)}/{PREFIX}{term}.json"


def manifest_bytes(manifest: Manifest) -> tuple[bytes, str]:
    """The manifest as it is written, and its hash."""
    sha256 = hashlib.sha256(encode(replace(manifest, sha256=""))).hexdigest()
    return encode(replace(manifest, sha256=sha256)), sha256


def read_manifest(data: bytes, *, name: str) -> Manifest:
    """Read a manifest and see that it is as it was written."""
    try:
        manifest = decode(Manifest, data)
    except WireError as error:
        raise ManifestError(f"{name} {_damage(data)}: {error}") from None
    if manifest.format != FORMAT:
        raise ManifestError(f"{name} has format {manifest.format}, which is not known here")
    if manifest_bytes(manifest)[1] != manifest.sha256:
        raise ManifestError(f"{name} was changed: its hash is not the one that it holds")
    return manifest


def _damage(data: bytes) -> str:
    try:
        json.loads(data)
    except ValueError:
        return "is cut short or damaged" if data.startswith(b"{") else "is no manifest"
    return "is no manifest"


def load_manifest(storage: Storage, name: str) -> Manifest:
    """Read the manifest of that name."""
    return read_manifest(storage.read(name), name=storage.uri_of(name))
