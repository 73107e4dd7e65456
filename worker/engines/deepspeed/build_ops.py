"""DeepSpeed's C++ extensions: compiled when a configuration first needs one, once per machine.

Only DeepSpeed's own optimizers need them; the sailor engine, and DeepSpeed with torch's optimizers,
need no compiler. ``python -m worker.engines.deepspeed.build_ops`` compiles them ahead of time.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.documents.problems import InputError, Problem

FOLDER = Path(sys.prefix) / "share" / "sailor" / "torch_extensions"
_VARIABLE = "TORCH_EXTENSIONS_DIR"
_AHEAD_OF_TIME = ("FusedAdamBuilder", "CPUAdamBuilder")


def ops_needed(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the builders of the extensions that a complete configuration needs."""
    optimizer = config.get("optimizer", {})
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    on_cpu = offload.get("device", "none") != "none"
    match str(optimizer.get("type", "")).lower():
        case "adam" | "adamw" | "muon" if not optimizer.get("params", {}).get("torch_adam"):
            return ("CPUAdamBuilder" if on_cpu else "FusedAdamBuilder",)
        case "lion":
            return ("CPULionBuilder" if on_cpu else "FusedLionBuilder",)
        case "lamb":
            return ("FusedLambBuilder",)
        case "adagrad" if on_cpu:
            return ("CPUAdagradBuilder",)
        case _:
            return ()


def use_extensions_folder(folder: Path = FOLDER) -> Path | None:
    """Let torch keep extensions in ``folder`` unless the user names another; ``None``: torch's own.

    Puts Python's own folder on ``PATH`` too: torch calls ninja, which is installed there, even to
    load an extension that is already compiled.
    """
    tools = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if tools not in path:
        os.environ["PATH"] = os.pathsep.join([tools, *path])
    if _VARIABLE in os.environ:
        return Path(os.environ[_VARIABLE])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.lock").touch()
    except OSError:
        return None  # Another user's environment.
    os.environ[_VARIABLE] = str(folder)
    return folder


def load_ops(names: Sequence[str]) -> None:
    """Load extensions, compiling those that are missing; ``InputError`` says why one cannot be.

    One process of the machine compiles while the others wait for its lock.
    """
    kept = use_extensions_folder()
    for name in names:
        builder = _builder(name)
        with _locked(kept):
            is_built = kept is not None and (kept / builder.name / f"{builder.name}.so").exists()
            if not is_built:
                _announce(builder.name, kept)
            try:
                builder.load(verbose=False)
            except (RuntimeError, OSError, ValueError) as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
                cure = "the compiler's output is above; or use one of torch's optimizers"
                raise InputError(Problem(_place(builder.name), why, cure)) from None


def _place(extension: str) -> str:
    return f"DeepSpeed's C++ extension {extension}"


def _builder(name: str) -> Any:
    accelerator: Any = importlib.import_module("deepspeed.accelerator")
    return accelerator.get_accelerator().create_op_builder(name)


def _announce(extension: str, folder: Path | None) -> None:
    """Say what is compiled; refuse early if there is no compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        what = f"must be compiled for this optimizer, and there is no C++ compiler ({compiler})"
        cure = (
            "install one (on Debian and Ubuntu: `apt-get install g++`), "
            'or use one of torch\'s optimizers, such as Adam with "torch_adam": true'
        )
        raise InputError(Problem(_place(extension), what, cure))
    where = "torch's cache of extensions" if folder is None else folder / extension
    print(
        f"compiling {_place(extension)}, which takes one to three minutes; it is kept in {where}",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """Hold the machine's lock on the folder, which the kernel releases if this process dies."""
    if folder is None:
        yield  # torch locks its own cache.
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # torch's own lock is a file that a killed build leaves behind, and others wait for it.
        for stale in folder.glob("*/lock"):
            stale.unlink()
        yield


def build() -> None:
    """Compile the Adam extensions ahead of time; report those that cannot be compiled here."""
    for name in _AHEAD_OF_TIME:
        try:
            load_ops([name])
        except InputError as error:
            print(*error.problems, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    build()
