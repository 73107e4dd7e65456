"""A systemd of its own on a tree of its own: boot it, run commands in it, end it.

``systemd-nspawn`` boots an overlay over the tree, in namespaces of its own, without a network. Only
namespaces of the process that this module started are entered, and nothing is booted or run on
``/``: ``systemd-tmpfiles`` of a booted system empties ``/tmp``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MARK = "etc/sailor-units-tree"
"""A file that every tree of ours has, and no other system."""
BOOT_S, COMMAND_S, LOOK_S = 60.0, 120.0, 0.1
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
MOUNT_AND_BOOT = """
set -eu
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
layers="lowerdir=$LOWER,upperdir=$RUN/upper,workdir=$RUN/work"
# Where the kernel can, a new link to a file of the lower tree copies no content.
mount -t overlay overlay -o "$layers,redirect_dir=on,metacopy=on" "$RUN/tree" 2>/dev/null ||
    mount -t overlay overlay -o "$layers" "$RUN/tree"
test -e "$RUN/tree/$MARK"
test "$(stat -c %d:%i "$RUN/tree")" != "$(stat -c %d:%i /)"
# Links to the same files in the versions' own file system: an upgrade links them, too, which would
# copy every file of an overlay. Nothing writes into them.
test -d "$RUN/opt" || cp -al "$LOWER/opt" "$RUN/opt"
mount --bind "$RUN/opt" "$RUN/tree/opt"
# A unit that protects the kernel's settings sees the boot of the machine, and not the container's.
cat /proc/sys/kernel/random/uuid > "$RUN/tree/etc/container-boot-id"
mkdir -p "$RUN/tree/etc/systemd/system/sailor-agent.service.d"
cat > "$RUN/tree/etc/systemd/system/sailor-agent.service.d/container.conf" <<END
[Unit]
Requires=container-boot-id.service
After=container-boot-id.service
[Service]
BindReadOnlyPaths=/etc/container-boot-id:/proc/sys/kernel/random/boot_id
END
# nspawn's own file there is deleted, and nothing can be mounted over a deleted file.
cat > "$RUN/tree/etc/systemd/system/container-boot-id.service" <<END
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=umount /proc/sys/kernel/random/boot_id
END
exec "$NSPAWN" -D "$RUN/tree" --register=no --keep-unit --boot --console=pipe --private-network
"""


class DrillError(Exception):
    """A drill did not end as it should."""


class Container:
    """One booted system. ``run`` keeps what it writes, over reboots; ``lower`` is only read."""

    def __init__(self, nspawn: Path, lower: Path, run: Path) -> None:
        refuse_own_system(lower)
        self.nspawn, self.lower, self.run_folder = nspawn, lower, run
        shutil.rmtree(run, ignore_errors=True)
        for name in ("upper", "work", "tree"):
            (run / name).mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.leader = 0
        """Its first process, as this system counts."""

    def boot(self) -> None:
        """Boot, and return when systemd takes orders."""
        with (self.run_folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                ["unshare", "-m", "--propagation", "private", "sh", "-c", MOUNT_AND_BOOT],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={
                    "PATH": os.environ["PATH"],
                    "LOWER": str(self.lower),
                    "RUN": str(self.run_folder),
                    "NSPAWN": str(self.nspawn),
                    "MARK": MARK,
                    "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                },
            )
        self.leader = wait("the container's first process", self._find_leader, BOOT_S)
        done = ("running", "degraded")
        wait("the end of the boot", lambda: self.call("systemctl", "is-system-running").out in done)

    def _find_leader(self) -> int | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise DrillError(
                "systemd-nspawn ended: " + (self.run_folder / "console").read_text()[-2000:]
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for child in children.read_text().split():
            try:
                status = Path(f"/proc/{child}/status").read_text()
            except OSError:
                continue  # One of the commands before nspawn; it has ended.
            is_first = any(
                line.startswith("NSpid:") and line.split()[-1] == "1" and len(line.split()) == 3
                for line in status.splitlines()
            )
            if is_first and Path(f"/proc/{child}/root/run/systemd/private").exists():
                return int(child)
        return None

    def call(self, *command: str, given: str = "", check: bool = False) -> Done:
        """Run a command in the container."""
        refuse_own_namespaces(self.leader)
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        try:
            done = subprocess.run(
                [*enter, *command],
                input=given,
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            told = f"{' '.join(command)}: still running after {COMMAND_S:.0f} s"
            raise DrillError(told) from None
        if check and done.returncode != 0:
            raise DrillError(
                f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return Done(done.returncode, done.stdout.strip(), done.stderr.strip())

    def do(self, *command: str, given: str = "") -> str:
        """Run a command that must succeed; return what it printed."""
        return self.call(*command, given=given, check=True).out

    def path(self, inside: str) -> Path:
        """Return where a file of the container lies for us."""
        refuse_own_namespaces(self.leader)
        return Path(f"/proc/{self.leader}/root", inside.lstrip("/"))

    def get(self, address: str, path: str = "/run/sailor/sailord.sock") -> Any:
        """Ask sailord over its socket; None if it does not answer."""
        connection = http.client.HTTPConnection("sailord", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5)
        try:
            connection.sock.connect(str(self.path(path)))
            connection.request("GET", address)
            answer = connection.getresponse()
            said = answer.read()
            return json.loads(said) if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def unit(self, name: str, *keys: str) -> Mapping[str, str]:
        """Return properties of a unit."""
        said = self.do("systemctl", "show", name, *(f"-p{key}" for key in keys))
        return dict(line.split("=", 1) for line in said.splitlines())

    def wait_down(self, limit_s: float) -> int:
        """Return once everything has ended: 0 after a poweroff, and not 0 after a reboot."""
        assert self._process is not None
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise DrillError(f"the system was not down after {limit_s:.0f} s") from None

    def end(self) -> None:
        """Shut down, or kill everything after a limit."""
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(BOOT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # Its first process ends all others with it.
            if self.leader and is_foreign(self.leader):
                os.kill(self.leader, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._process = None


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def refuse_own_system(tree: Path) -> None:
    """Fail if the tree is the system that we run on, or not one of ours."""
    is_own = os.path.samefile(tree, "/")
    if is_own or not (tree / MARK).is_file():
        raise DrillError(f"{tree} is no tree of `make units`: it is not booted")


def is_foreign(pid: int) -> bool:
    """Return whether a process has its own root, processes and mounts."""
    try:
        spaces = [os.readlink(f"/proc/{pid}/ns/{each}") for each in ("mnt", "pid", "net")]
        is_same_root = os.path.samefile(f"/proc/{pid}/root", "/")
        has_mark = Path(f"/proc/{pid}/root", MARK).is_file()
    except OSError:
        return False
    own = [os.readlink(f"/proc/self/ns/{each}") for each in ("mnt", "pid", "net")]
    return has_mark and not is_same_root and not set(spaces) & set(own)


def refuse_own_namespaces(pid: int) -> None:
    """Fail unless the process is the first one of a container of ours."""
    if not pid or not is_foreign(pid):
        raise DrillError("the container's first process is gone")


def wait(what: str, ask: Callable[[], T | None], limit_s: float = 60.0) -> T:
    """Return the first answer that is true; fail after a limit."""
    begin = time.monotonic()
    while True:
        if answer := ask():
            return answer
        if time.monotonic() > begin + limit_s:
            raise DrillError(f"no {what} within {limit_s:.0f} s")
        time.sleep(LOOK_S)
