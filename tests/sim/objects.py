"""The simulated object store for checkpoints: objects and immutable manifests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.protocol.records import Durable, Holding, JobId, NodeId, Point, Uploaded
from sailord.checkpoints.manifest import folder_of
from sailord.checkpoints.object_storage import ListedObject
from sailord.checkpoints.retention import folders_of, names_to_delete
from sailord.core.model.commands import CollectGarbage, WriteManifest
from tests.sim.workers import LAYERS


@dataclass(frozen=True)
class Manifest:
    """The list of objects that form a checkpoint."""

    point: Point
    parts: tuple[Uploaded, ...]
    parent: Durable | None


class Objects:
    """Uploaded objects by job and point; it can be unavailable, and objects can be damaged."""

    def __init__(self) -> None:
        self.is_up = True
        self.truncates_writes = self.loses_answers = False
        """The current failure of writes: truncated (and detected), or stored without an answer."""
        self.there: dict[str, Uploaded] = {}
        self.manifests: dict[str, Manifest] = {}

    def put(
        self, job: JobId, point: Point, writer: NodeId, holds: tuple[Holding, ...]
    ) -> Uploaded | None:
        """Upload one node's share; return ``None`` if the store fails.

        Whole objects are never written again (``write_once`` in agents/object_store.py).
        """
        if not self.is_up or not holds:
            return None
        uri = f"{folder_of(job, point)}/{writer}"
        whole = Uploaded(point, uri, 1, "", holds)
        if self.there.get(uri) != whole:
            self.there[uri] = replace(whole, bytes=0) if self.truncates_writes else whole
        is_told = self.there[uri] == whole and not self.loses_answers
        return whole if is_told else None

    def write_manifest(self, order: WriteManifest, term: int) -> Durable:
        """Write a manifest; repeating it in the same term changes nothing."""
        uri = f"{folder_of(order.job.id, order.point)}/manifest-{term}.json"
        self.manifests[uri] = Manifest(order.point, order.parts, order.parent)
        return Durable(order.point, uri, "")

    def is_whole(self, durable: Durable) -> bool:
        """Return whether every layer is readable from exactly one object."""
        manifest = self.manifests.get(durable.manifest)
        if manifest is None or manifest.point != durable.point:
            return False
        layers = sorted(part.layer for each in manifest.parts for part in each.holds)
        is_there = all(self.there.get(each.uri) == each for each in manifest.parts)
        return is_there and layers == list(range(LAYERS))

    def line(self, durable: Durable | None) -> list[Durable]:
        """Return a checkpoint and its ancestors that still have a manifest, newest first."""
        found: list[Durable] = []
        while durable is not None and durable.manifest in self.manifests:
            found.append(durable)
            durable = self.manifests[durable.manifest].parent
        return found

    def newest_readable(self, durable: Durable, step_max: int | None = None) -> Durable | None:
        """Return this checkpoint or its newest readable ancestor, of at most that step."""
        line = self.line(durable)
        old = [each for each in line if step_max is None or each.point.step <= step_max]
        return next((each for each in old if self.is_whole(each)), None)

    def collect(self, order: CollectGarbage) -> None:
        """Remove exactly what the real garbage rule names."""
        job, keep = order.job.id, order.job.saving.keep
        chain = self.line(order.durable)
        below = f"{job}/"
        names = [*self.there, *self.manifests]
        entries = [
            ListedObject(name.removeprefix(below), 1) for name in names if name.startswith(below)
        ]
        referenced = {
            each.point: frozenset(
                part.uri.rpartition("/")[2] for part in self.manifests[each.manifest].parts
            )
            for each in chain[:keep]
        }
        for name in names_to_delete(
            job,
            folders_of(entries),
            chain,
            generation=order.record.number,
            restore=order.record.restore.point,
            keep=keep,
            referenced=referenced,
        ):
            self.there.pop(name, None)
            self.manifests.pop(name, None)

    def damage(self, durable: Durable) -> None:
        """Delete or damage an object of a checkpoint."""
        manifest = self.manifests.get(durable.manifest)
        if manifest is not None:
            self.there.pop(manifest.parts[0].uri, None)
