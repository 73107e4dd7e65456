"""DeepSpeed's compiled extensions: built once, by ``make install``, and found by every run.

Nothing needs them unless a configuration asks for DeepSpeed's own optimizers. Whoever loads one
that is not there compiles it, and guards its folder meanwhile by a file ``lock`` that all others
wait for; a builder that was killed leaves it behind for ever. So whoever uses the folder claims it
in a way that ends with its processes, and the first to come removes what nobody can hold any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "share" / "sailor" / "torch_extensions"
_PLACE = "TORCH_EXTENSIONS_DIR"
_BUILDERS = ("FusedAdamBuilder", "CPUAdamBuilder")


@contextlib.contextmanager
def claimed(folder: Path = FOLDER) -> Iterator[None]:
    """Let extensions be found, or be built, in the folder; a place that the user names is his own.

    The claim is inherited by processes that are forked within, and ends when all have ended.
    """
    _let_tools_be_found()
    if _PLACE in os.environ:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = (folder / "claims").open("w", encoding="ascii")
    except OSError:
        # Somebody else's environment: torch has a place of its own for such.
        yield
        return
    with claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # Others are here, and a lock may be theirs.
        else:
            for stale in folder.glob("*/lock"):
                stale.unlink()
        fcntl.flock(claim, fcntl.LOCK_SH)
        os.environ[_PLACE] = str(folder)
        try:
            yield
        finally:
            del os.environ[_PLACE]


def _let_tools_be_found() -> None:
    """Put ninja on the path, which stands beside Python; even what is built is not loaded else."""
    tools = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if tools not in path:
        os.environ["PATH"] = os.pathsep.join([tools, *path])


def build() -> None:
    """Build what a configuration may ask for; what cannot be built here is told, and left out."""
    with claimed():
        accelerator: Any = importlib.import_module("deepspeed.accelerator")
        for name in _BUILDERS:
            builder = accelerator.get_accelerator().create_op_builder(name)
            begin_s = time.monotonic()
            try:
                builder.load(verbose=False)
            except (RuntimeError, OSError) as error:
                why = (str(error).splitlines() or ["no reason was given"])[0]
                print(f"DeepSpeed's {builder.name} cannot be built here: {why}")
            else:
                print(f"DeepSpeed's {builder.name}: {time.monotonic() - begin_s:.0f} s")


if __name__ == "__main__":
    build()
