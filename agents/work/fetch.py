"""Fetches packages from the leader, or from nodes that have them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.daemon.failpoints import failpoint
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.identity import MEMBER
from agents.work.package import Package, package_of
from worker.atomic_file import replacing

PART_S = 30.0
"""The longest time for one part."""


class FetchError(Exception):
    """A package was not found, or is not what its name says."""


@dataclass(eq=False)
class PackageFetcher:
    """The packages of a node, each a file."""

    folder: Path
    client: SignedClient
    sources: Callable[[], Awaitable[Sequence[str]]]
    """Addresses to ask, the best first."""

    def path(self, package: Package) -> Path:
        """Return the file of a package, which may not be there."""
        return self.folder / str(package)

    async def fetch(self, package: Package) -> Path:
        """Return the file of a package; fetch and check it if it is not there, or damaged."""
        path = self.path(package)
        if not path.exists() or await asyncio.to_thread(package_of, path) != package:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                sources = list(await self.sources())
                for part in range(package.parts):
                    file.write(await self._part(package, part, sources))
                    failpoint("fetching")
                file.flush()
                fetched = await asyncio.to_thread(package_of, Path(file.name))
                if fetched != package:
                    raise FetchError(f"package {package} differs from its name after the transfer")
        path.touch()  # The oldest are deleted first.
        return path

    async def _part(self, package: Package, part: int, sources: list[str]) -> bytes:
        """Ask one source after the other; those that do not have it are not asked again."""
        why = "no leader elected yet"
        while sources:
            try:
                status, body = await self.client.call(
                    sources[0], "GET", f"/v1/packages/{package}/{part}", to=MEMBER, timeout_s=PART_S
                )
            except CallFailed as error:
                why = str(error)
            else:
                if status == 200 and len(body) == package.part_bytes(part):
                    return body
                why = f"{sources[0]} does not have it"
            sources.pop(0)
        raise FetchError(f"the package of the work folder cannot be fetched: {why}")
