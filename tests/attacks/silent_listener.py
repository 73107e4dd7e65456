"""A listener that waits half a second for a request; prints its port."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from agents.rpc.listener import Listener
from agents.rpc.strangers import StrangerLimits


async def main() -> None:
    """Serve until killed."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    listener = Listener(runner, StrangerLimits(), silent_s=0.5)
    await listener.start("127.0.0.1", 0)
    sys.stdout.write(f"{listener.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
