"""Makes sealed files durable as agents and sailord would, without running either."""

from __future__ import annotations

from pathlib import Path

from agents.protocol.records import (
    FIRST,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    Point,
    Saving,
    Uploaded,
)
from sailord.checkpoints.manifest import folder_of, manifest_bytes, manifest_name
from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.verify import compose
from sailord.core.model.commands import WriteManifest
from sailord.planning.job_spec import job_shape, read_job
from tests.worker.checkpoint.snapshot_runs import Generation, folders
from worker.checkpoint.snapshot_file import (
    SealedFile,
    head_bytes,
    head_checksum,
    partial_header,
    read_piece,
    sealed_files,
)


def commit(root: Path, after: Generation, spec: str, uri: str) -> str:
    """Upload each rank's part; return the address of the manifest."""
    storage, id_ = open_storage(uri), JobId("job")
    point = Point(after.step, after.number)
    parts = []
    for source in folders(root, after):
        for found in sealed_files(source.folder):
            data = _object(found)
            if data is None:
                continue
            keys, content = data
            name = f"{folder_of(id_, point)}/{found.path.stem}-{source.name}.snap"
            storage.write(name, content)
            holds = tuple(Holding(layer, piece, piece + 1) for layer, piece in keys)
            checksum = head_checksum(content)
            parts.append(Uploaded(point, storage.uri_of(name), len(content), checksum, holds))
    layers, atoms = job_shape(read_job(spec))
    job = JobRecord(id_, "running", layers=layers, atoms=atoms, saving=Saving(storage.uri))
    record = GenerationRecord(id_, after.number, "open", "sha", (), FIRST, 1, "")
    order = WriteManifest(job, record, tuple(parts), point, None)
    described, _ = manifest_bytes(compose(storage, order, term=1, spec=spec))
    name = manifest_name(id_, point, 1)
    storage.write(name, described)
    return storage.uri_of(name)


def _object(found: SealedFile) -> tuple[list[tuple[int, int]], bytes] | None:
    """Return the pieces of a file that its rank has to write, as an object."""
    own = {piece.key: piece for piece in found.header.pieces if piece.is_written}
    if not own:
        return None
    header = partial_header(found.header, own)
    data = bytearray(header.total_bytes)
    for piece in header.pieces:
        data[piece.offset : piece.offset + piece.bytes] = read_piece(found.path, own[piece.key])
    head = head_bytes(header)
    data[: len(head)] = head
    return list(own), bytes(data)
