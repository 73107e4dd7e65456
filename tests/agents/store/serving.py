"""A process that serves an embedded store, to be killed: FILE SOCKET [HISTORY]."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents.store.socket_server import serve
from agents.store.sqlite_store import EmbeddedStore


async def main(file: Path, socket: Path, history_max: int) -> None:
    store = await EmbeddedStore.open(file, history_max=history_max)
    await serve(store, socket)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
