"""Draw the page of a running cluster as pictures for the documents.

python -m scripts.page_picture docs/pictures

Starts eight emulated nodes that train, has one lost, one drained and one announced as preempted,
and writes the page as a wide light picture and as one of a dark phone. Takes a minute or two.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from tests.sailord.page.browser import Tab, open_browser

PATIENCE_S = 300.0
PHONE_MOST = 1500
"""The height of the phone's picture; the page goes on below it."""
WHOLE = (
    "document.querySelectorAll('.curve').length === 2"
    " && document.querySelectorAll('#timeline .measured rect.forward').length > 3"
    " && document.querySelectorAll('#moves li').length > 3"
    " && document.querySelector('#lost li')"
    " && document.querySelector('#details-facts').innerText.includes('lost')"
)
DETAILS = "[...document.querySelectorAll('.node')].find(b => b.innerText.includes('a1')).click()"


def main() -> None:
    """Start the cluster, disturb it, and write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with LocalCluster(LocalFolders(folder / "c")) as cluster:
            _play(cluster)
            asyncio.run(_draw(cluster, folder, given.out))


def _play(cluster: LocalCluster) -> None:
    cluster.start()
    storage = f'\n[checkpoint]\nuri = "file://{cluster.place.checkpoints}"\npersist_every = 10\n'
    job = cluster.place.job("job.toml").replace("[training]", "[training]\nsteps = 2000")
    cluster.client.ask("POST", "/v1/jobs", {"job": job + storage, "id": "tale"})
    _wait(cluster, lambda job: job["step"] >= 12)
    cluster.kill_node("a2")
    _wait_steps(cluster, 5, without=1)
    cluster.client.ask("POST", "/v1/nodes/b1/drain", {"reason": "a fan is loud"})
    _wait_steps(cluster, 5, without=2)
    cluster.client.ask("POST", "/v1/nodes/c2/preempt", {"notice_s": 300})
    _wait_steps(cluster, 8, without=3)


def _wait_steps(cluster: LocalCluster, steps: int, *, without: int) -> None:
    """Wait until the job has done ``steps`` steps with ``without`` nodes fewer."""
    most = len(cluster.machines) - without
    _wait(cluster, lambda job: len(job["members"]) <= most)
    step = cluster.client.ask("GET", "/v1/status")["job"]["step"]
    _wait(cluster, lambda job: job["step"] >= step + steps)


def _wait(cluster: LocalCluster, holds: Callable[[dict[str, Any]], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        cluster.look_after()
        job = cluster.client.ask("GET", "/v1/status")["job"]
        if job is not None and job["phase"]["name"] == "running" and holds(job):
            return
        assert time.monotonic() < end, job
        time.sleep(0.2)


async def _draw(cluster: LocalCluster, folder: Path, out: Path) -> None:
    async with open_browser(folder) as tab:
        await tab.screen(1280, 900)
        await tab.open(cluster.place.page)
        await tab.wait("document.querySelectorAll('.node').length >= 7")
        await tab.run(DETAILS + "; 1")
        await tab.wait(WHOLE, within_s=PATIENCE_S)
        await _picture(tab, out / "page.png", 1280)
        await tab.run("document.getElementById('details-close').click(); 1")
        await _picture(tab, out / "page-phone.png", 390, dark=True, most=PHONE_MOST)


async def _picture(
    tab: Tab, file: Path, width: int, *, dark: bool = False, most: int = 4000
) -> None:
    """Write the page down to ``most`` pixels, with 256 colours: a third of the bytes."""
    await tab.screen(width, 900, dark=dark)
    height = await tab.run("document.documentElement.scrollHeight")
    await tab.screen(width, height, dark=dark)
    await tab.picture(file)
    with Image.open(file) as picture:
        box = (0, 0, picture.width, min(picture.height, most))
        picture.crop(box).convert("RGB").quantize(256).save(file, optimize=True)


if __name__ == "__main__":
    main()
