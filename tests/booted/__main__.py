"""``python -m tests.booted``: boot the units under a real systemd, in a container, and drill them.

Exit codes: 0 every drill passed; 1 one failed; 3 with ``--if-cached``: no tree is cached; 4 this
machine cannot boot a container; the output names what is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.booted.container import Container, DrillError
from tests.booted.drills import AGENT, SAILORD, Drills, files, ignore_interrupts
from tests.booted.tree import (
    PYTHON,
    ROOT,
    MachineError,
    base_tree,
    cache_folder,
    check_machine,
    installed_tree,
    is_cached,
    locked,
    tool,
)

FAILED, NOT_CACHED, CANNOT = 1, 3, 4
Row = tuple[str, str, Callable[[Drills], None]]
DRILLS: tuple[Row, ...] = (
    ("set-up", "key, user, `sailord check`", Drills.set_up),
    ("start", "sailord starts", Drills.sailord_starts),
    ("no-gpu", "the agent without a GPU: exit 2, a message", Drills.agent_without_gpu),
    ("emulated", "the agent with emulated devices starts", Drills.emulated_agent_starts),
    ("train", "the installed example trains", Drills.job_trains),
    ("restart-sailord", "restart of sailord", lambda d: d.restart(SAILORD)),
    ("restart-agent", "restart of the agent", lambda d: d.restart(AGENT)),
    ("kill-sailord", "kill -9 of sailord", lambda d: d.kill(SAILORD)),
    ("kill-agent", "kill -9 of the agent", lambda d: d.kill(AGENT)),
    ("freeze-sailord", "SIGSTOP of sailord", lambda d: d.freeze(SAILORD)),
    ("freeze-agent", "SIGSTOP of the agent", lambda d: d.freeze(AGENT)),
    ("credentials", "the key from /etc/credstore", Drills.credentials),
    ("upgrade", "upgrade while it trains", Drills.upgrade),
    ("rollback", "rollback while it trains", Drills.rollback),
    ("stop", "stop of the last node's agent", Drills.stop_last_agent),
    ("start-again", "start after that: ready", Drills.start_again),
    ("journal", "journal: priorities and fields", Drills.journal),
    ("reboot-down", "reboot while it trains: down", Drills.reboot_down),
    ("reboot-up", "booted, and it trains", Drills.reboot_up),
    ("alone", "a node without a leader: off", Drills.alone),
    ("verify", "systemd-analyze verify", Drills.verify),
    ("security", "systemd-analyze security", Drills.security),
    ("two", "two sailords on etcd, the leader stopped", Drills.two_sailords),
    ("semaphores", "planners leave no semaphores", Drills.no_semaphores),
    ("page", "crashes end in `failed`, and page", Drills.failed_unit_pages),
    ("uninstall", "uninstall keeps state", Drills.uninstall),
    ("purge", "--purge leaves nothing", Drills.purge),
)


def main() -> int:
    """Read the arguments, build what is missing, and run the drills."""
    parser = argparse.ArgumentParser(prog="make units", description=__doc__)
    parser.add_argument("--mirror", help="of Debian; default: the one that apt uses here")
    parser.add_argument("--if-cached", action="store_true", help="do nothing without a cached tree")
    parser.add_argument("--tree", type=Path, help="boot this tree as it is")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed drill")
    parser.add_argument("--skip", action="append", default=[], help="a drill's name")
    arguments = parser.parse_args()
    ignore_interrupts()
    cache = cache_folder()
    if arguments.if_cached and not is_cached(cache):
        print(f"units: skipped: no tree is cached in {cache} (`make units`)", file=sys.stderr)
        return NOT_CACHED
    try:
        check_machine()
        with locked(cache):
            base = base_tree(cache, arguments.mirror)
            tree = arguments.tree or installed_tree(cache, base)
            nspawn = tool(cache, "systemd-nspawn")
            return run(Container(nspawn, tree.resolve(), cache / "run"), base, arguments)
    except DrillError as error:
        print(f"units: {error}", file=sys.stderr)
        return FAILED
    except MachineError as error:
        print(f"units: skipped: this machine cannot boot a container: {error}", file=sys.stderr)
        return CANNOT


def run(box: Container, base: Path, arguments: argparse.Namespace) -> int:
    """Boot, drill, print the table, tear down; return the exit code."""
    failed: list[str] = []
    begin_s = time.monotonic()
    try:
        box.boot()
        _row("boot", time.monotonic() - begin_s, "")
        drills = Drills(box, partial(install_again, box), files(base))
        for name, what, drill in DRILLS:
            if name in arguments.skip:
                continue
            drill_s = time.monotonic()
            drills.seconds.clear()
            try:
                drill(drills)
            except DrillError as error:
                failed.append(name)
                _row(what, time.monotonic() - drill_s, f"FAILED ({name})\n{_indented(str(error))}")
                if not arguments.keep_going:
                    _tell_more(box)
                    break
            else:
                _row(what, drills.seconds.get("lap", time.monotonic() - drill_s), "")
    finally:
        box.end()
    print(f"{len(failed)} failed; {time.monotonic() - begin_s:.0f} s in all")
    return 1 if failed else 0


def install_again(box: Container, version: str) -> None:
    """Install the checkout in the running system, under another number."""
    source = box.run_folder / "checkout"
    shutil.rmtree(source, ignore_errors=True)
    left_out = shutil.ignore_patterns(".*", "tests", "benchmarks", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
    project = source / "pyproject.toml"
    text = re.sub(r'^version = ".*"', f'version = "{version}"', project.read_text(), flags=re.M)
    project.write_text(text)
    # From outside, as the container has no network: the tree is the running system's own.
    done = subprocess.run(
        [PYTHON, source / "scripts/system.py", box.path("/"), "--group", "worker"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DrillError(f"the upgrade failed: {done.stdout}{done.stderr}")


def _tell_more(box: Container) -> None:
    try:
        print(box.call("sailorctl", "status").out)
        print(box.call("journalctl", "--no-pager", "-n", "40", "-o", "short-monotonic").out)
    except DrillError:
        print((box.run_folder / "console").read_text()[-2000:])


def _row(what: str, seconds: float, remark: str) -> None:
    print(f"{what:<46}{seconds:>7.1f} s  {remark}".rstrip(), flush=True)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-30:])


if __name__ == "__main__":
    sys.exit(main())
