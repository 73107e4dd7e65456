"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium in the PATH (apt-get install)"
)
START_S = 60.0
ANSWER_S = 30.0


@dataclass(eq=False)
class Tab:
    """One page of the browser."""

    wire: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list)
    """Exceptions, errors of the console, and requests to elsewhere."""
    received: int = 0
    """Bytes of answers, headers not counted."""
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _number: int = 0

    async def read(self) -> None:
        """Take answers and events, until the wire is closed."""
        async for message in self.wire:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if not waiting.done():
                    waiting.set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str([each.get("value") for each in about["args"]]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.dataReceived":
            self.received += about["encodedDataLength"] or about["dataLength"]

    async def call(self, method: str, **parameters: Any) -> Any:
        """Send a command; return its result."""
        self._number += 1
        number = self._number
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        await self.wire.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, ANSWER_S)
        assert "error" not in said, f"{method}: {said['error']}"
        return said["result"]

    async def run(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise."""
        said = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, f"{script}: {said['exceptionDetails']}"
        return said["result"].get("value")

    async def wait(self, script: str, *, within_s: float = 60.0) -> Any:
        """Return the first true value of an expression; the page may still be loading."""
        end = asyncio.get_running_loop().time() + within_s
        tried = f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()"
        while not (value := await self.run(tried)):
            text = await self.run("document.body?.innerText.slice(0, 1500)")
            assert asyncio.get_running_loop().time() < end, f"{script} never held; {text}"
            await asyncio.sleep(0.05)
        return value

    async def open(self, url: str) -> None:
        """Go to an address."""
        await self.call("Page.navigate", url=url)

    async def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the screen and the preferred colours."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                        deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, file: Path) -> None:
        """Save what the whole page looks like."""
        said = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(said["data"]))


@contextlib.asynccontextmanager
async def open_browser(folder: Path) -> AsyncIterator[Tab]:
    """Start Chromium with a profile of its own, and end it with all its processes."""
    assert CHROMIUM is not None
    profile = folder / "chromium"
    flags = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
        *("--disable-dev-shm-usage", "--disable-component-update", "--no-proxy-server"),
        f"--user-data-dir={profile}",
    )
    with (folder / "chromium.log").open("ab") as out:
        process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], stdout=out, stderr=out, start_new_session=True
        )
    try:
        port = await _port_of(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as reply:
                address = (await reply.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=1 << 28) as wire:
                tab = Tab(wire)
                reading = asyncio.create_task(tab.read())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
                yield tab
                reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _port_of(file: Path) -> int:
    end = asyncio.get_running_loop().time() + START_S
    while not file.exists() or "\n" not in file.read_text(encoding="ascii"):
        assert asyncio.get_running_loop().time() < end, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(file.read_text(encoding="ascii").partition("\n")[0])
