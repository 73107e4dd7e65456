"""Draw the screen of a running sailord as a picture for the documents.

python scripts/screen_picture.py unix:///tmp/sailor-0/head/sailord.sock docs/pictures/up.svg
"""

from __future__ import annotations

import argparse
import io
import re
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from sailord.client import Client
from sailord.screen.poller import Poller
from sailord.screen.ui import Ui
from sailord.screen.view import screen


def main() -> None:
    """Ask several times, so that the losses make a curve, and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="90x24")
    parser.add_argument("--looks", type=int, default=30)
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    poller = Poller(Client(given.server))
    for _ in range(given.looks):
        poller.look()
        time.sleep(0.5)
    console = Console(record=True, width=width, height=height, file=io.StringIO(), highlight=False)
    console.print(screen(poller.seen, Ui(can_kill=True), width, height), end="")
    text = console.export_svg(title="sailorctl up", theme=MONOKAI, unique_id="up")
    # Use the reader's own fonts, and download none.
    given.out.write_text(re.sub(r"@font-face \{.*?\}\n", "", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
