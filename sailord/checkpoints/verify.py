"""Verifies checkpoints: manifest, objects, and on request every byte.

``compose`` builds a manifest from uploads and checks their headers; ``faults_of`` lists all that is
wrong with the objects of a manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import xxhash

from agents.protocol.records import JobId, Uploaded
from sailord.checkpoints.manifest import Manifest, Object, Tensor, folder_of
from sailord.checkpoints.object_storage import Damaged, Missing, Storage, StorageError
from sailord.core.model.commands import WriteManifest
from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from simulator.spec.job import Job
from worker.checkpoint.snapshot_file import (
    Header,
    Piece,
    SnapshotError,
    head_checksum,
    head_length,
    layer_number,
    parse_head,
)
from worker.layout.rank_layout import tensors_by_layer
from worker.layout.tensor_table import tables_of

FIRST_BYTES = 1 << 16
"""First read of an object; most headers are shorter."""
CHUNK_BYTES = 64 << 20


def read_head(storage: Storage, name: str) -> tuple[Header, str]:
    """The header of an object, and its checksum."""
    uri = storage.uri_of(name)
    data = storage.read(name, 0, FIRST_BYTES)
    length = head_length(data, name=uri)
    # A shorter answer is the whole object; beyond its end a bucket refuses to read.
    if length > len(data) >= FIRST_BYTES:
        data += storage.read(name, len(data), length)
    return parse_head(data, name=uri), head_checksum(data)


# ---- composing a manifest -----------------------------------------------------------------------


def compose(storage: Storage, order: WriteManifest, *, term: int, spec: str) -> Manifest:
    """Build the manifest of uploaded parts; raises ``StorageError``."""
    job, point = order.job, order.point
    try:
        tensors = tensors_of(read_job(spec))
    except InputError as error:
        raise StorageError(f"the file of {job.id} cannot be used: {error}") from None
    headers: list[Header] = []
    objects: list[Object] = []
    for part in order.parts:
        name = _object_name(storage, job.id, part)
        folder = folder_of(job.id, point)
        try:
            header, checksum = read_head(storage, f"{folder}/{name}")
        except SnapshotError as error:
            raise StorageError(str(error)) from None
        if checksum != part.checksum:
            raise StorageError(f"{part.uri} is not the uploaded object: its header differs")
        if (header.job, header.generation, header.step) != (job.id, point.generation, point.step):
            said = f"step {header.step} of generation {header.generation} of {header.job}"
            raise StorageError(f"{part.uri} is of {said}")
        has = {piece.key for piece in header.pieces}
        missing = [key for key in _pieces(part) if key not in has]
        if missing:
            raise StorageError(f"{part.uri} has no piece {missing[0][1]} of layer {missing[0][0]}")
        headers.append(header)
        objects.append(Object(name, part.bytes, checksum, part.holds))
    first = headers[0]
    for header, part in zip(headers, order.parts, strict=True):
        if _what(header) != _what(first):
            raise StorageError(f"{part.uri} is of another model than {order.parts[0].uri}")
        if header.progress != first.progress:
            what = f"has different training progress than {order.parts[0].uri}"
            raise StorageError(f"{part.uri} {what}")
    return Manifest(
        job=job.id,
        point=point,
        term=term,
        plan=order.record.plan,
        model=first.model,
        layers=first.layers,
        atoms=first.atoms,
        dtype=first.dtype,
        moments=first.moments,
        tensors=tensors,
        objects=tuple(objects),
        progress=first.progress,
        spec=spec,
        parent=order.parent,
    )


def _what(header: Header) -> tuple[object, ...]:
    return header.model, header.layers, header.atoms, header.dtype, header.moments


def _object_name(storage: Storage, job: JobId, part: Uploaded) -> str:
    prefix = f"{storage.uri_of(folder_of(job, part.point))}/"
    name = part.uri.removeprefix(prefix)
    if name == part.uri or "/" in name:
        raise StorageError(f"{part.uri} is not directly below {prefix}")
    return name


def _pieces(part: Uploaded | Object) -> Iterator[tuple[int, int]]:
    for holding in part.holds:
        for piece in range(holding.first, holding.end):
            yield holding.layer, piece


def tensors_of(job: Job) -> tuple[Tensor, ...]:
    """The tensor table of a job."""
    count = len(job.model.layers)
    tables = tensors_by_layer(tables_of(job))
    numbered = {layer_number(layer, layers=count): specs for layer, specs in tables.items()}
    return tuple(
        Tensor(number, spec.name, spec.shape, spec.split_dim)
        for number, specs in sorted(numbered.items())
        for spec in specs
    )


# ---- checking a manifest ------------------------------------------------------------------------


def faults_of(storage: Storage, manifest: Manifest, *, job: JobId, is_thorough: bool) -> list[str]:
    """All faults of a checkpoint; a thorough check reads every byte."""
    if manifest.job != job:
        return [f"it is a checkpoint of {manifest.job}, not of {job}"]
    found = list(_coverage(manifest))
    for each in manifest.objects:
        found += _object_faults(storage, manifest, each, is_thorough=is_thorough)
    return found


def _coverage(manifest: Manifest) -> Iterator[str]:
    """Every piece must be in exactly one object."""
    held = Counter(key for each in manifest.objects for key in _pieces(each))
    for layer in range(manifest.layers):
        for piece in range(manifest.atoms + 1):
            count = held.pop((layer, piece), 0)
            if count != 1:
                times = "in no object" if count == 0 else f"in {count} objects"
                yield f"piece {piece} of layer {layer} is {times}"
    for layer, piece in sorted(held):
        yield f"piece {piece} of layer {layer} does not belong to this model"


def _object_faults(
    storage: Storage, manifest: Manifest, each: Object, *, is_thorough: bool
) -> list[str]:
    name = f"{folder_of(manifest.job, manifest.point)}/{each.name}"
    uri = storage.uri_of(name)
    try:
        size = storage.size(name)
        header, checksum = read_head(storage, name)
    except Missing:
        return [f"{uri} is missing"]
    except (Damaged, SnapshotError) as error:
        return [str(error)]
    if checksum != each.checksum:
        return [f"{uri} is not the object of the manifest: its header differs"]
    if size < header.total_bytes:
        return [f"{uri} is truncated: {size} bytes instead of {header.total_bytes}"]
    if header.model != manifest.model:
        return [f"{uri} is of another model"]
    if not is_thorough:
        return []
    wanted = set(_pieces(each))
    pieces = [piece for piece in header.pieces if piece.key in wanted]
    return [fault for piece in pieces if (fault := _piece_fault(storage, name, piece))]


def _piece_fault(storage: Storage, name: str, piece: Piece) -> str:
    end = piece.offset + piece.bytes
    total = xxhash.xxh3_128()
    for first in range(piece.offset, end, CHUNK_BYTES):
        try:
            total.update(storage.read(name, first, min(first + CHUNK_BYTES, end)))
        except Damaged as error:
            return str(error)
    if total.hexdigest() == piece.checksum:
        return ""
    where = f"piece {piece.piece} of layer {piece.layer} (bytes {piece.offset} to {end - 1})"
    return f"{storage.uri_of(name)}: {where} is damaged: its checksum does not match"
