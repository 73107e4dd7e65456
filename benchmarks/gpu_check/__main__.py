"""Checks what works on this machine's GPUs and how fast; writes one JSON file and one page.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--quick] [--out FOLDER] [PART ...]

Needs torch with CUDA and numpy; parts that need more say which packages. Each part is a process of
its own with a time limit, so that one that crashes or hangs does not affect the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.page import page_of

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 530.0
"""The whole check ends within 9 minutes."""
LIMIT_LEAST_S = 5.0
CLEAN_UP_S = 15.0
"""How long a part whose time is over may clean up."""
LIMITS_S: dict[str, float] = {
    "machine": 40.0,
    "kernels": 70.0,
    "training": 210.0,
    "predictions": 150.0,
    "own_model": 90.0,
    "deepspeed": 90.0,
    "snapshots": 70.0,
    "transport": 110.0,
    "deaths": 160.0,
    "recovery": 150.0,
}
"""Seconds for each part, in the order in which they run."""
CLUSTER = "aiohttp click cryptography fsspec google.protobuf grpc jwt pathspec prometheus_client"
NEEDS: Mapping[str, tuple[str, ...]] = {
    "own_model": ("transformers", "peft"),
    "deepspeed": ("deepspeed", "safetensors", "xxhash"),
    "snapshots": ("xxhash",),
    "recovery": ("xxhash", "structlog", "pynvml", "etcd3", *CLUSTER.split()),
}
"""What parts import besides torch and numpy."""
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
"""The line of a trace that says what happened."""
PACKAGES = {
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "jwt": "PyJWT[crypto]",
    "pynvml": "nvidia-ml-py",
    "prometheus_client": "prometheus-client",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write both files, print the page; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="Everything once and small.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("parts", nargs="*", help=f"Of {', '.join(LIMITS_S)}; default: all.")
    wishes = parser.parse_args(arguments)
    unknown = set(wishes.parts) - set(LIMITS_S)
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    wishes.out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    parts: dict[str, Any] = {}
    for name in wishes.parts or LIMITS_S:
        print(f"{time.monotonic() - begin_s:6.1f} s  {name} ...", file=sys.stderr, flush=True)
        left_s = begin_s + WITHIN_S - time.monotonic()
        parts[name] = run_part(name, wishes.device, wishes.quick, wishes.out.resolve(), left_s)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _device(parts, wishes.device),
        "quick": wishes.quick,
        "seconds": time.monotonic() - begin_s,
        "parts": parts,
    }
    page = page_of(found)
    (wishes.out / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (wishes.out / "gpu-check.md").write_text(page, encoding="utf-8")
    print(page)
    print(f"written to {wishes.out}/gpu-check.json and gpu-check.md", file=sys.stderr)
    return int(any(part["state"] == "failed" for part in parts.values()))


def run_part(name: str, device: str, is_quick: bool, out: Path, left_s: float) -> dict[str, Any]:
    """Run one part in a process of its own; return its figures, or why it has none."""
    missing = [each for each in ("torch", "numpy", *NEEDS.get(name, ())) if not is_there(each)]
    if missing:
        names = " ".join(PACKAGES.get(each, each) for each in missing)
        return {"state": "skipped", "why": f"missing packages: pip install {names}"}
    limit_s = min(LIMITS_S[name], left_s)
    if limit_s < LIMIT_LEAST_S:
        return {"state": "skipped", "why": f"no time is left of {WITHIN_S:.0f} s"}
    answer, log = out / f".{name}.json", out / f"{name}.log"
    answer.unlink(missing_ok=True)
    words = [name, device, "quick" if is_quick else "full", str(out)]
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.part", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _add_root(os.environ.get("PYTHONPATH", ""))},
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # It ends what it has started outside its own process group.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = {"seconds": time.monotonic() - begin_s}
    if code == 0 and answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        return found | took
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    last = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    ended = f"did not end within {limit_s:.0f} s" if code is None else f"ended with {code}"
    return {"state": "failed", "why": f"{ended}: {last[:300]} ({log})"} | took


def _add_root(folders: str) -> str:
    """Put this checkout before the user's folders of modules, which stay."""
    return os.pathsep.join([str(ROOT), *filter(None, [folders])])


def is_there(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _device(parts: Mapping[str, Any], device: str) -> str:
    devices = parts.get("machine", {}).get("found", {}).get("devices", [])
    names = sorted({each["name"] for each in devices})
    return f"{len(devices)} x {', '.join(names)}" if devices else device


if __name__ == "__main__":
    sys.exit(main())
