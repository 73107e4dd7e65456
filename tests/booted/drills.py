"""Drills on a booted system, each with its time limit and the checks of what it promises."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sailord.providers.gce.requests import unit as rented_unit
from tests.booted.container import Container, DrillError, wait
from tests.booted.tree import ROOT

SAILORD, AGENT, WORKERS = "sailord.service", "sailor-agent.service", "sailor-worker.service"
JOB = "drill"
EXAMPLE = "/usr/share/doc/sailor/examples/small.toml"
CHECKPOINTS = "/var/lib/sailor/checkpoints"
EXPOSURE_MOST = {SAILORD: 1.5, AGENT: 2.5, WORKERS: 2.5}
"""Of 10, as `systemd-analyze security` counts."""
DRAIN_S, SHUTDOWN_S, ALONE_S = 12, 8, 8
NEXT = "99.0.0"
"""The version to which the upgrade goes."""


@dataclass
class Drills:
    """One system, and what the drills know of it."""

    box: Container
    install: Callable[[str], None]
    """Install the checkout in the running system, as the version that is named."""
    files_before: frozenset[str] = frozenset()
    """The files of the tree before Sailor was installed."""
    seconds: dict[str, float] = field(default_factory=dict)

    # ---- what is asked of the system -----------------------------------------------------------

    def job(self) -> dict[str, Any] | None:
        """Return the job that has the cluster."""
        said = self.box.get("/v1/status")
        return None if said is None else said["job"]

    def step(self) -> int:
        """Return the job's step; -1: unknown."""
        job = self.job()
        return -1 if job is None else int(job["step"])

    def generation(self) -> int:
        """Return the number of the job's generation; 0: there is none."""
        job = self.job()
        return 0 if job is None or job["generation"] is None else int(job["generation"]["number"])

    def node_state(self) -> str:
        """Return the state of the newest node."""
        nodes = (self.box.get("/v1/nodes") or {"nodes": []})["nodes"]
        alive = [n["state"] for n in nodes if n["state"] != "lost"]
        return alive[-1] if alive else "none"

    def workers(self) -> frozenset[tuple[int, int]]:
        """Return the living worker processes: number and start."""
        found = set()
        for home in self.box.path("/var/lib/sailor-worker/process").glob("*"):
            try:
                born = json.loads((home / "process.json").read_text())
            except (OSError, ValueError):
                continue
            if not (home / "exit").exists():
                found.add((int(born["pid"]), int(born["start"])))
        return frozenset(found)

    def main_pid(self, unit: str) -> int:
        """Return the number of the unit's main process, in the container."""
        return int(self.box.unit(unit, "MainPID")["MainPID"])

    def wait_training(self, limit_s: float, steps: int = 3) -> None:
        """Return once the job is some steps further, with a state that says so."""
        first = self.step()

        def is_training() -> bool:
            nonlocal first
            job = self.job()
            if job is None:
                return False
            if first < 0 or job["step"] < first:
                first = job["step"]
            return bool(job["phase"]["name"] == "running" and job["step"] >= first + steps)

        wait("training", is_training, limit_s)

    def wait_ready(self, limit_s: float) -> None:
        """Return once sailord reports the node as `ready`."""
        wait("ready node", lambda: self.node_state() == "ready", limit_s)

    def check_kept(self, workers: frozenset[tuple[int, int]], generation: int) -> None:
        """Fail unless the same processes train in the same generation."""
        self.wait_training(20)
        if self.workers() != workers:
            raise DrillError(f"other worker processes: {set(workers)} -> {set(self.workers())}")
        if self.generation() != generation:
            raise DrillError(f"generation {generation} -> {self.generation()}")

    # ---- the beginning -------------------------------------------------------------------------

    def set_up(self) -> None:
        """Key, user, check: the commands of docs/operations.md."""
        self.box.do("systemd-sysusers")
        key = "openssl rand -hex 32 | install -o sailor -m 0600 /dev/stdin /etc/sailor/cluster.key"
        self.box.do("sh", "-c", key)
        with self.box.path("/etc/sailor/sailord.toml").open("a") as config:
            config.write(f'\n[checkpoints]\nallowed = ["file://{CHECKPOINTS}"]\n')
        self.box.do("runuser", "-u", "sailor", "--", "sailord", "check")

    def sailord_starts(self) -> None:
        """It is ready, and leads."""
        self.box.do("systemctl", "enable", "--now", SAILORD)
        wait("leader", lambda: (self.box.get("/readyz") or {}).get("leads"), 10)

    def agent_without_gpu(self) -> None:
        """It exits with 2, says what is missing and what to do, and is not tried again."""
        if self.box.call("systemctl", "start", AGENT).code == 0:
            raise DrillError("it started")
        found = self.box.unit(AGENT, "ExecMainStatus", "NRestarts", "ActiveState")
        expected = {"ExecMainStatus": "2", "NRestarts": "0", "ActiveState": "failed"}
        said = self.box.do("journalctl", "-u", AGENT, "--no-pager", "-o", "cat")
        if found != expected or "NVIDIA" not in said or "emulate" not in said:
            raise DrillError(f"{found}\n{said}")

    def emulated_agent_starts(self) -> None:
        """With emulated devices it is ready."""
        config = self.box.path("/etc/sailor/agent.toml")
        text = 'emulate = "2xA100-40"\nzone = "us-central1-a"\n'
        text += f"drain_s = {DRAIN_S}\nshutdown_s = {SHUTDOWN_S}\n"
        text += config.read_text()
        config.write_text(text)
        self.box.do("systemctl", "enable", "--now", AGENT)
        self.wait_ready(10)

    def job_trains(self) -> None:
        """The installed example, with a place for checkpoints and more steps."""
        text = self.box.path(EXAMPLE).read_text()
        text = re.sub(r"steps = \d+", "steps = 10_000_000", text)
        text += f'\n[checkpoint]\nuri = "file://{CHECKPOINTS}"\n'
        self.box.path("/root/drill.toml").write_text(text)
        self.box.do("install", "-d", "-o", "sailor", "-m", "0700", CHECKPOINTS)
        self.box.do("sailorctl", "submit", "/root/drill.toml", "--id", JOB)
        self.wait_training(60)

    # ---- restarts ------------------------------------------------------------------------------

    def restart(self, unit: str) -> None:
        """Ready again; the same workers train in the same generation."""
        workers, generation = self.workers(), self.generation()
        begin = time.monotonic()
        self.box.do("systemctl", "restart", unit)
        self.wait_ready(10)
        self._lap(begin)
        self.check_kept(workers, generation)

    def kill(self, unit: str) -> None:
        """The same after kill -9."""
        workers, generation = self.workers(), self.generation()
        begin, pid = time.monotonic(), self.main_pid(unit)
        self.box.do("systemctl", "kill", "-s", "KILL", "--kill-who=main", unit)
        self._wait_replaced(unit, pid, 10)
        self.wait_ready(10)
        self._lap(begin)
        self.check_kept(workers, generation)

    def freeze(self, unit: str) -> None:
        """The watchdog replaces a process that hangs; training goes on."""
        begin, pid = time.monotonic(), self.main_pid(unit)
        self.box.do("systemctl", "kill", "-s", "STOP", "--kill-who=main", unit)
        self._wait_replaced(unit, pid, 35)
        self._lap(begin)
        self.wait_ready(15)
        self.wait_training(30)

    def _wait_replaced(self, unit: str, pid: int, limit_s: float) -> None:
        def is_new() -> bool:
            found = self.box.unit(unit, "MainPID", "ActiveState")
            return found["ActiveState"] == "active" and int(found["MainPID"]) not in (0, pid)

        wait(f"new process of {unit}", is_new, limit_s)

    def stop_last_agent(self) -> None:
        """No other node can train: the stop ends in time and says why it was no drain."""
        begin = time.monotonic()
        self.box.call("systemctl", "stop", "--no-block", AGENT)

        def says_so() -> bool:
            told = self.box.call("sailorctl", "status").out + self.box.call("sailorctl", "why").out
            return "no other node" in told

        wait("`status` that says that the drain cannot end", says_so, 15)
        states = ("failed", "inactive")
        wait(
            "end of the agent",
            lambda: self.box.unit(AGENT, "ActiveState")["ActiveState"] in states,
            200,
        )
        self._lap(begin)
        if self.box.unit(AGENT, "Result")["Result"] == "timeout":
            raise DrillError("systemd had to kill it")

    def start_again(self) -> None:
        """A start after the stop: `ready`, and the job goes on."""
        begin = time.monotonic()
        self.box.do("systemctl", "start", AGENT)
        self.wait_ready(30)
        self._lap(begin)
        self.wait_training(30)

    def journal(self) -> None:
        """Lines have their priority and the job's name as a field."""
        of_job = ("journalctl", "-q", "--no-pager", f"SAILOR_JOB={JOB}", "-u", AGENT)
        if not self.box.do(*of_job):
            raise DrillError("no line has the field SAILOR_JOB")
        errors = self.box.do(*of_job, "-p", "err")
        if "the drain did not end" not in errors or '"level": "info"' in errors:
            raise DrillError(f"lines of priority `err`: {errors[-500:]}")

    def credentials(self) -> None:
        """The key as a credential that root alone can read; training goes on."""
        workers, generation = self.workers(), self.generation()
        key, credential = "/etc/sailor/cluster.key", "/etc/credstore/sailor.cluster.key"
        self.box.do("install", "-D", "-m", "0600", key, credential)
        self.box.do("rm", key)
        self.box.do("systemctl", "restart", SAILORD, AGENT)
        self.wait_ready(10)
        self.check_kept(workers, generation)
        self.box.do("install", "-o", "sailor", "-m", "0600", credential, key)
        self.box.do("rm", credential)
        self.box.do("systemctl", "restart", SAILORD, AGENT)
        self.wait_ready(10)
        self.check_kept(workers, generation)

    # ---- versions ------------------------------------------------------------------------------

    def upgrade(self) -> None:
        """While it trains: `sailord --version` answers at every moment."""
        workers, generation = self.workers(), self.generation()
        begin = time.monotonic()
        self._while_it_answers(lambda: self.install(NEXT))
        self._check_runs(NEXT, workers, generation, begin)

    def rollback(self) -> None:
        """Back to the version before, while it trains."""
        workers, generation = self.workers(), self.generation()
        begin = time.monotonic()
        self._while_it_answers(lambda: self.box.do("sailor-system", "rollback"))
        self._check_runs(version("sailor"), workers, generation, begin)

    def _check_runs(
        self, wanted: str, workers: frozenset[tuple[int, int]], generation: int, begin: float
    ) -> None:
        """Restart both units; fail unless they run that version, and training went on."""
        self.box.do("systemctl", "daemon-reload")
        self.box.do("systemctl", "restart", SAILORD, AGENT)
        self.wait_ready(10)
        self._lap(begin)
        told = [self.box.do(each, "--version") for each in ("sailord", "sailor-agent", "sailorctl")]
        if not all(each.endswith(f" {wanted}") for each in told):
            raise DrillError(f"not version {wanted}: {told}")
        self.check_kept(workers, generation)

    def _while_it_answers(self, work: Callable[[], object]) -> None:
        stop, log = "/root/stop-asking", "/root/answers"
        loop = (
            f"rm -f {stop} {log}; while [ ! -e {stop} ]; do "
            f"sailord --version >/dev/null 2>>{log} || echo FAILED >>{log}; sleep 0.2; done"
        )
        self.box.do("systemd-run", "-q", "--unit=asking", "sh", "-c", loop)
        try:
            work()
        finally:
            self.box.path(stop).touch()
        wait(
            "end of the asking",
            lambda: self.box.call("systemctl", "is-active", "asking").out != "active",
            10,
        )
        answers = self.box.path(log)
        if answers.exists() and answers.read_text().strip():
            raise DrillError(f"`sailord --version` failed: {answers.read_text()[-500:]}")

    # ---- reboot --------------------------------------------------------------------------------

    def reboot_down(self) -> None:
        """While it trains: everything has ended in time."""
        # A journal that outlives the boot.
        self.box.do("mkdir", "-p", "/var/log/journal")
        self.box.do("journalctl", "--flush")
        begin = time.monotonic()
        self.box.do("systemctl", "reboot", "--no-block")
        self.box.wait_down(60)
        self._lap(begin)

    def reboot_up(self) -> None:
        """Both units come back, and the job trains; the agent was told of the shutdown."""
        begin = time.monotonic()
        self.box.boot()
        self.wait_training(60)
        self._lap(begin)
        self._check_last_words("its workers end with the machine")

    def alone(self) -> None:
        """A node without a leader powers itself off, which ends the bill of a rented one."""
        config = self.box.path("/etc/sailor/agent.toml")
        config.write_text(f"alone_s = {ALONE_S}\n" + config.read_text())
        self.box.do("systemctl", "restart", AGENT)
        self.wait_ready(10)
        begin = time.monotonic()
        self.box.do("systemctl", "stop", SAILORD)
        if code := self.box.wait_down(ALONE_S + 30):
            raise DrillError(f"the container ended with {code}, and not because of a poweroff")
        self._lap(begin)
        self.box.boot()
        self._check_last_words("no leader has answered")
        config = self.box.path("/etc/sailor/agent.toml")
        config.write_text(config.read_text().partition("\n")[2])
        self.box.do("systemctl", "restart", AGENT)
        self.wait_training(60)

    def _check_last_words(self, said: str) -> None:
        """Fail unless the agent's last errors before this boot say so."""
        errors = self.box.do("journalctl", "-q", "--no-pager", "-b", "-1", "-u", AGENT, "-p", "err")
        if said not in errors:
            raise DrillError(f"before this boot the agent did not say: {said}\n{errors[-2000:]}")

    # ---- two of them ---------------------------------------------------------------------------

    def two_sailords(self) -> None:
        """On etcd; the leader is stopped, and the other leads."""
        box = self.box
        box.do("systemctl", "stop", AGENT, SAILORD)
        run_etcd = ["--data-dir", "/var/lib/drill-etcd", "--log-level", "error"]
        box.do("systemd-run", "-q", "--unit=drill-etcd", "etcd", *run_etcd)
        config = box.path("/etc/sailor/sailord.toml").read_text()
        shared = 'store = "etcd://127.0.0.1:2379"\n'
        unit = box.path("/usr/lib/systemd/system/sailord.service").read_text()
        for name, port in (("one", 7077), ("two", 7177)):
            text = shared + config.replace("/var/lib/sailor", f"/var/lib/sailor/{name}")
            text = text.replace("7077", str(port)).replace("sailord.sock", f"{name}.sock")
            box.path(f"/etc/sailor/{name}.toml").write_text(text)
            text = unit.replace("/etc/sailor/sailord.toml", f"/etc/sailor/{name}.toml")
            box.path(f"/etc/systemd/system/drill-{name}.service").write_text(text)
        box.do("systemctl", "daemon-reload")
        box.do("systemctl", "start", "drill-one")
        wait("first leader", lambda: self._leads("one"), 15)
        box.do("systemctl", "start", "drill-two")
        wait("standby", lambda: (box.get("/readyz", "/run/sailor/two.sock") or {}).get("ready"), 15)
        begin = time.monotonic()
        box.do("systemctl", "stop", "drill-one")
        wait("second leader", lambda: self._leads("two"), 10)
        self._lap(begin)
        box.do("systemctl", "stop", "drill-two", "drill-etcd")
        for name in ("one", "two"):
            box.path(f"/etc/systemd/system/drill-{name}.service").unlink()
            box.path(f"/etc/sailor/{name}.toml").unlink()
        box.do("rm", "-r", "/var/lib/drill-etcd")
        box.do("systemctl", "daemon-reload")

    def _leads(self, name: str) -> bool:
        return bool((self.box.get("/readyz", f"/run/sailor/{name}.sock") or {}).get("leads"))

    # ---- what systemd says ---------------------------------------------------------------------

    def verify(self) -> None:
        """`systemd-analyze verify` is silent."""
        for unit in (SAILORD, AGENT, WORKERS, "sailor-failed@sailord.service"):
            done = self.box.call("systemd-analyze", "verify", "--man=no", unit)
            if done.code or done.err or done.out:
                raise DrillError(f"{unit}: {done.out}{done.err}")

    def security(self) -> None:
        """The units are as exposed as they may be, and no more."""
        # What a rented instance gets.
        rented = self.box.path("/etc/systemd/system/drill-rented.service")
        rented.write_text(rented_unit(AGENT))
        for unit, most in {**EXPOSURE_MOST, rented.name: EXPOSURE_MOST[AGENT]}.items():
            said = self.box.do("systemd-analyze", "security", "--no-pager", unit)
            overall = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
            if overall is None or float(overall[1]) > most:
                raise DrillError(f"{unit}: {said.splitlines()[-1]}, more than {most}")
        rented.unlink()

    # ---- the end -------------------------------------------------------------------------------

    def failed_unit_pages(self) -> None:
        """A crash loop of sailord ends in `failed`, and /etc/sailor/on-failure runs."""
        config = self.box.path("/etc/sailor/on-failure")
        config.write_text("#!/bin/sh\necho $1 > /run/paged\n")
        drop_in = self.box.path("/etc/systemd/system/sailord.service.d/drill.conf")
        drop_in.parent.mkdir()
        drop_in.write_text("[Service]\nExecStart=\nExecStart=/bin/false\nRestartSec=0\n")
        self.box.do("systemctl", "daemon-reload")
        self.box.call("systemctl", "start", SAILORD)
        wait("failed unit", lambda: self.box.call("systemctl", "is-failed", SAILORD).code == 0, 60)
        wait("page", self.box.path("/run/paged").exists, 10)
        drop_in.unlink()
        drop_in.parent.rmdir()
        self.box.do("systemctl", "daemon-reload")

    def uninstall(self) -> None:
        """It leaves configuration and state, and with --purge nothing."""
        box = self.box
        box.do("systemctl", "reset-failed")
        box.do("systemctl", "start", SAILORD, AGENT)
        self.wait_training(60)
        refused = box.call("sailor-system", "uninstall")
        if refused.code == 0 or "workers run on" not in refused.err:
            raise DrillError(f"workers run, and it said: {refused.out}{refused.err}")
        box.do("systemctl", "start", SAILORD, AGENT)
        self.wait_ready(30)
        box.do("sailorctl", "cancel", JOB)
        wait("end of the job", lambda: self.job() is None, 30)
        box.do("sailor-system", "uninstall")
        for left in ("/opt/sailor", "/usr/bin/sailord", "/usr/lib/systemd/system/sailord.service"):
            if box.path(left).exists():
                raise DrillError(f"{left} is left")
        for kept in ("/etc/sailor/cluster.key", "/var/lib/sailor"):
            if not box.path(kept).exists():
                raise DrillError(f"{kept} is gone")

    def purge(self) -> None:
        """Nothing is left: a diff of the tree, and of the memory file system."""
        # As `make uninstall PURGE=1` does: the command itself is gone by now.
        script = (ROOT / "scripts/installed.py").read_text()
        self.box.do("python3", "-", "uninstall", "--purge", given=script)
        left = files(self.box.path("/")) - self.files_before
        # The container itself needs a file beside the agent's unit.
        left -= {each for each in left if "/sailor-agent.service.d" in each}
        ours = sorted(each for each in left if re.search(r"sail|sem\.mp", each))
        if ours:
            raise DrillError("left: " + ", ".join(ours[:20]))

    def no_semaphores(self) -> None:
        """Planners leave nothing in /dev/shm."""
        left = [p.name for p in self.box.path("/dev/shm").glob("sem.mp-*")]
        if left:
            raise DrillError(f"{len(left)} semaphores in /dev/shm")

    def _lap(self, begin: float) -> None:
        """Say that the drill's time ends here; what follows are checks."""
        self.seconds["lap"] = time.monotonic() - begin


def files(root: Path) -> frozenset[str]:
    """Return all files and folders of a system, without what its kernel shows."""
    left_out = ["./proc", "./sys", "./root", "./var/log", "./tmp", "./var/tmp"]
    prune = [part for each in left_out for part in ("-path", each, "-prune", "-o")]
    said = subprocess.run(
        ["find", ".", *prune, "-print"], cwd=root, capture_output=True, text=True, check=False
    )
    return frozenset(said.stdout.splitlines())


def ignore_interrupts() -> None:
    """Ctrl-C ends a run only where its container is ended, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
