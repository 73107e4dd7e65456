"""The manifest of a checkpoint: its objects, and all that is needed to read them.

It contains the job's file, so that a checkpoint is self-contained, and lies beside its objects:
``<uri>/<job>/<generation>-<step>/``. Workers read it as plain JSON: ``worker/checkpoint/manifest``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.protocol.codec import WireError, encode, plain, read
from agents.protocol.records import Durable, Holding, JobId, Point
from sailord.checkpoints.object_storage import Storage
from worker.checkpoint.manifest import FORMAT, PREFIX, ManifestError, hash_of, read_fields
from worker.checkpoint.snapshot_file import SavedProgress


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


def folder_of(job: JobId, point: Point) -> str:
    """The folder of a checkpoint's objects and manifests, relative to the uri."""
    return f"{job}/{point.generation}-{point.step}"


def manifest_name(job: JobId, point: Point, term: int) -> str:
    """The name of a manifest; unique to the leader, so that no two leaders write the same file."""
    return f"{folder_of(job, point)}/{PREFIX}{term}.json"


def manifest_bytes(manifest: Manifest) -> tuple[bytes, str]:
    """The manifest's bytes, and its hash."""
    sha256 = hash_of(plain(manifest))
    return encode(replace(manifest, sha256=sha256)), sha256


def read_manifest(data: bytes, *, name: str) -> Manifest:
    """Parse a manifest and verify its hash."""
    try:
        return read(Manifest, read_fields(data, name=name))
    except WireError as error:
        raise ManifestError(f"{name} is not a manifest: {error}") from None


def load_manifest(storage: Storage, name: str) -> Manifest:
    """Read and verify the manifest of that name."""
    return read_manifest(storage.read(name), name=storage.uri_of(name))
