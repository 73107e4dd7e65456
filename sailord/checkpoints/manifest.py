"""The manifest of a checkpoint: its objects, and all that is needed to read them.

It is JSON, contains its own hash (so that damage is detected) and the job's file (so that a
checkpoint is self-contained), and lies beside its objects: ``<uri>/<job>/<generation>-<step>/``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from agents.protocol.codec import WireError, decode, encode, plain
from agents.protocol.records import Durable, Holding, JobId, Point
from sailord.checkpoints.object_storage import Storage
from worker.checkpoint.snapshot_file import SavedProgress

FORMAT = 1
PREFIX = "manifest-"


@dataclass(frozen=True, slots=True)
class Object:
    """One object, and the pieces that are read from it."""

    name: str
    """Relative to the manifest's folder."""
    bytes: int
    checksum: str
    """Of its header, which contains the checksums of its pieces."""
    holds: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor; shared tensors have the last layer's number plus one as ``layer``."""

    layer: int
    name: str
    shape: tuple[int, ...]
    split_dim: int | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint that is committed or complete."""

    job: JobId
    point: Point
    term: int
    plan: str
    model: str
    """The fingerprint of the model; only a model with the same can be restored."""
    layers: int
    atoms: int
    """Atoms per split tensor (G); a layer has one more piece, for tensors that are not split."""
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
    """Of this manifest with this field empty."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.objects)


class ManifestError(ValueError):
    """The file is not a manifest, or is damaged."""


def folder_of(job: JobId, point: Point) -> str:
    """The folder of a checkpoint's objects and manifests, relative to the uri."""
    return f"{job}/{point.generation}-{point.step}"


def manifest_name(job: JobId, point: Point, term: int) -> str:
    """The name of a manifest; unique to the leader, so that no two leaders write the same file."""
    return f"{folder_of(job, point)}/{PREFIX}{term}.json"


def manifest_bytes(manifest: Manifest) -> tuple[bytes, str]:
    """The manifest's bytes, and its hash."""
    sha256 = _hash(plain(manifest))
    return encode(replace(manifest, sha256=sha256)), sha256


def _hash(raw: dict[str, Any]) -> str:
    """Return the hash of all that a manifest holds, known to this version or not."""
    return hashlib.sha256(encode({**raw, "sha256": ""})).hexdigest()


def read_manifest(data: bytes, *, name: str) -> Manifest:
    """Parse a manifest and verify its hash."""
    try:
        manifest = decode(Manifest, data)
    except WireError as error:
        raise ManifestError(f"{name} {_damage(data)}: {error}") from None
    if manifest.format != FORMAT:
        raise ManifestError(f"{name} has format {manifest.format}; this version reads {FORMAT}")
    if _hash(json.loads(data)) != manifest.sha256:
        raise ManifestError(f"{name} was changed: its hash does not match")
    return manifest


def _damage(data: bytes) -> str:
    try:
        json.loads(data)
    except ValueError:
        return "is truncated or damaged" if data.startswith(b"{") else "is not a manifest"
    return "is not a manifest"


def load_manifest(storage: Storage, name: str) -> Manifest:
    """Read and verify the manifest of that name."""
    return read_manifest(storage.read(name), name=storage.uri_of(name))
