"""The goodput ledger and a real Prometheus over a storm: ``python -m tests.chaos.ledger_storm``.

A sailord rents emulated instances whose workers count steps. Every few seconds an instance, its
workers or sailord is killed, a node gets a notice or is drained, or the job is paused. Beside it
this process keeps a bill of its own, from the provider's folder: when each instance came and went.
At the end the ledger's causes must sum to the GPU time of the bill within 0.1 %, and their dollars
to the bill within a cent; and Prometheus must have scraped the same.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all
from tests.control.cluster import JOB, LEASE_S, PARK_S
from tests.fakes.prometheus import Prometheus
from tests.fakes.worker import MEETING
from tests.processes import SAILORCTL, wait_until
from tests.sailord.daemon.running import ROOT, Place

GPUS, MACHINES = 2, 2
"""Of an instance; instances at once of each pool."""
USD_PER_HOUR = {"us-central1-a": 2.4, "us-central1-b": 3.1}
EVERY_S = 5.0
"""Mean time between faults."""
LOOK_S = 0.02
WAIT_S = 240.0
"""Longest wait for an event that must come; planners and workers share the cores."""
SHARE_MAX, USD_MAX = 0.001, 0.01
"""The most by which the ledger may differ from the bill."""
FAULTS = {
    "instance": 5,
    "workers": 2,
    "sailord": 2,
    "notice": 3,
    "false notice": 1,
    "drain": 1,
    "pause": 1,
}
"""Relative frequency of each fault."""
MUST_FIRE = {"SailorRefusedRequests"}
MUST_NOT_FIRE = {
    *("SailorNoLeader", "SailorStoreDown", "SailorWritesRejected", "SailorUnreadableRecords"),
    *("SailorBudgetNearlySpent", "SailorBootsFail", "SailorOrphans", "SailorDeviceUnhealthy"),
}
WORKER_AND_LIMITS = f"""
lease_s = {LEASE_S}
worker = "tests.fakes.worker"
[listen]
port = 0
[options.testing]
park_s = {PARK_S}
"""
SMALL = JOB.replace("layers = 24", "layers = 8").replace("max_tp = 2", "max_tp = 1")
CAPACITY = """
[capacity.testing]
look_s = 0.5
surplus_s = 5.0
lost_s = 5.0
delete_again_s = 2.0
"""


@dataclass(eq=False)
class Bill:
    """What the provider's folder says: each instance from its creation to its end."""

    folder: Path
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By id: created, dollars an hour."""
    _is_over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Look again and again until told to stop."""
        while not self._is_over.wait(LOOK_S):
            for path in self.folder.glob("*/instance.json"):
                if path.parent.name not in self.lives:
                    with suppress(FileNotFoundError):
                        card = json.loads(path.read_bytes())
                        usd = USD_PER_HOUR[card["pool"]["zone"]]
                        self.lives[path.parent.name] = card["created_at"], usd

    def stop(self) -> None:
        """End the watch."""
        self._is_over.set()

    def sums(self) -> tuple[float, float]:
        """Return GPU seconds and dollars, once all instances ended."""
        ended = json.loads((self.folder / "ended.json").read_bytes())
        spans = [(ended[id_] - begun, usd) for id_, (begun, usd) in self.lives.items()]
        return sum(s for s, _ in spans) * GPUS, sum(s * usd / 3600 for s, usd in spans)


def unlike(
    causes: Iterable[Mapping[str, Any]], gpu_s: Mapping[str, float], usd: Mapping[str, float]
) -> list[str]:
    """Say which sums of a ledger differ from those that were scraped."""
    return [
        f"{each['cause']}: {told} {each[told]}, scraped {scraped.get(each['cause'], 0.0)}"
        for each in causes
        for scraped, told in ((gpu_s, "gpu_s"), (usd, "usd"))
        if each["cause"] != "step_under_way"
        and abs(scraped.get(each["cause"], 0.0) - each[told]) > 1e-6
    ]


@dataclass(frozen=True)
class Result:
    """What is known when the storm is over."""

    seconds: float
    faults: Counter[str]
    instances: int
    bill_gpu_s: float
    bill_usd: float
    ledger: dict[str, Any]
    """As `sailorctl goodput --json` tells it."""
    scraped_gpu_s: dict[str, float]
    scraped_usd: dict[str, float]
    shrunk: dict[str, float]
    """Counters that went back, and how often."""
    targets: dict[str, str]
    """What Prometheus scraped, or should have, when the job had begun and when it trained again
    after the faults; and what was wrong with each; empty: nothing."""
    broken_rules: dict[str, str]
    prometheus: dict[str, float]
    """What Prometheus counts of itself that is not zero and should be."""
    fired: frozenset[str]

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        said = self.ledger
        causes_gpu_s = sum(each["gpu_s"] for each in said["causes"]) - said["ahead_gpu_s"]
        causes_usd = sum(each["usd"] for each in said["causes"]) - said["ahead_usd"]
        found = []
        if abs(causes_gpu_s - self.bill_gpu_s) > SHARE_MAX * self.bill_gpu_s:
            found.append(f"{causes_gpu_s:.3f} GPU s on causes, {self.bill_gpu_s:.3f} on the bill")
        if abs(causes_usd - self.bill_usd) > USD_MAX:
            found.append(f"${causes_usd:.4f} on causes, ${self.bill_usd:.4f} on the bill")
        found += unlike(said["causes"], self.scraped_gpu_s, self.scraped_usd)
        found += [f"{name} shrank {times:.0f} times" for name, times in self.shrunk.items()]
        found += [f"target {name}: {why}" for name, why in self.targets.items() if why]
        found += [f"rule {name}: {why}" for name, why in self.broken_rules.items()]
        found += [f"{name} is {value:.0f}" for name, value in self.prometheus.items()]
        found += [f"{name} did not fire" for name in sorted(MUST_FIRE - self.fired)]
        found += [f"{name} fired" for name in sorted(MUST_NOT_FIRE & self.fired)]
        return found


@dataclass(eq=False)
class LedgerStorm:
    """A sailord that rents, a Prometheus that scrapes it, and what is done to both."""

    folder: Path
    rng: random.Random
    machines: int = MACHINES
    faults: Counter[str] = field(default_factory=Counter)
    _due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pools = "".join(
            f'[[provider.pool]]\nzone = "{zone}"\nmachine = "a2-highgpu-2g"\nspot = true\n'
            f"usd_per_hour = {usd}\nmachines_max = {self.machines}\n"
            for zone, usd in USD_PER_HOUR.items()
        )
        provider = '[provider]\nkind = "emulated"\nfolder = "machines"\nagent = "agent.toml"\n'
        self.place = Place(self.folder, webhooks=provider + pools + CAPACITY)
        self.place.environment = {MEETING: str(self.folder / "meeting")}
        (self.folder / "agent.toml").write_text(
            f'cluster_name = "test"\nstate = "."\nkey = "{self.place.key}"\n'
            f'store = "{self.place.store_url}"\n{WORKER_AND_LIMITS}'
        )
        self.bill = Bill(self.folder / "machines")
        self.prometheus = Prometheus(self.folder / "prometheus", f"127.0.0.1:{self.place.port}")

    def run(self, faults: Iterable[tuple[float, str]]) -> Result:
        """Play faults, each after a pause in seconds, and return what is known after them."""
        watch = threading.Thread(target=self.bill.watch)
        watch.start()
        self.head = self.place.start()
        try:
            self.prometheus.start()
            return self._run(faults)
        finally:
            self.prometheus.stop()
            self.place.stop_all()
            for instance in (self.folder / "machines").glob("*"):
                kill_all(instance)
            self.bill.stop()
            watch.join()

    def _run(self, faults: Iterable[tuple[float, str]]) -> Result:
        begun = time.monotonic()
        wait_until(lambda: self.place.ask("GET", "/readyz")[1].get("leads"))
        code, said = self.place.ask("POST", "/v1/jobs", {"job": SMALL, "id": "j"})
        assert code == 201, said
        targets = self._targets(at_least=2)
        for pause_s, kind in faults:
            self._live(pause_s)
            with suppress(OSError, IndexError):  # sailord is away, or nothing is rented.
                self._resume_if_held()
                getattr(self, "_" + kind.replace(" ", "_"))()
                self.faults[kind] += 1
        while self._due:
            self._live(0.2)
        targets |= self._targets(at_least=1)
        self._be_refused()
        self._give_all_back()
        return self._result(time.monotonic() - begun, targets)

    def at_random(self, seconds: float) -> Iterator[tuple[float, str]]:
        """Draw faults for this many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            kind = self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
            yield self.rng.uniform(0.2, 1.8) * EVERY_S, kind

    def _live(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for each in [each for each in self._due if each[0] <= now]:
                self._due.remove(each)
                with suppress(OSError):
                    each[1]()
            time.sleep(0.05)

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    # ---- faults ---------------------------------------------------------------------------------

    def _any(self) -> Path:
        return self.rng.choice(sorted((self.folder / "machines").glob("*/instance.json"))).parent

    def _instance(self) -> None:
        kill_all(self._any())

    def _workers(self) -> None:
        for path in self._any().glob("generation/*/*/process.json"):
            with suppress(FileNotFoundError, ProcessLookupError):
                subprocess.run(["kill", "-9", str(json.loads(path.read_bytes())["pid"])],
                               capture_output=True, check=False)  # fmt: skip

    def _sailord(self) -> None:
        if self.head.poll() is None:
            self.head.kill()
            self.head.wait()
            self._later(self.rng.uniform(0.0, 4.0), self._start)

    def _start(self) -> None:
        self.head = self.place.start()

    def _notice(self) -> None:
        chosen, within_s = self._any(), self.rng.uniform(2.0, 10.0)
        self._order(chosen, "preempt", {"leaves_at": time.time() + within_s})
        self._later(within_s, lambda: kill_all(chosen))

    def _false_notice(self) -> None:
        chosen = self._any()
        self._order(chosen, "preempt", {"leaves_at": time.time() + 30})
        self._later(3.0, lambda: self._order(chosen, "withdraw", {}))

    def _drain(self) -> None:
        chosen = self._any()
        self._order(chosen, "drain", {})
        self._later(8.0, lambda: kill_all(chosen))

    def _pause(self) -> None:
        self.place.ask("POST", "/v1/jobs/j/pause", {})
        self._later(2.0, lambda: self.place.ask("POST", "/v1/jobs/j/resume", {}))

    def _order(self, instance: Path, order: str, body: object) -> None:
        self.place.ask("POST", f"/v1/nodes/m-{instance.name}/{order}", body)

    def _be_refused(self) -> None:
        """Ask 60 times with a wrong token, as an attack would.

        A restarted sailord's counter must be scraped before it grows.
        """
        begun = f"timestamp(sailor_requests_refused_total) > {time.time()}"
        wait_until(lambda: self.prometheus.query(begun))
        for number in range(60):
            asked = urllib.request.Request(f"http://127.0.0.1:{self.place.port}/v1/status")
            asked.add_header("Authorization", f"Bearer {number}")
            with suppress(OSError):  # 401, or 429 once there were many.
                urllib.request.urlopen(asked, timeout=10).close()

    # ---- the end --------------------------------------------------------------------------------

    def _rented(self) -> set[str]:
        """The nodes of the provider's instances, by the provider's folder."""
        found = (self.folder / "machines").glob("*/instance.json")
        return {f"m-{path.parent.name}" for path in found}

    def _nodes(self) -> dict[str, str]:
        """The address of each node that is not lost, by name."""
        code, said = self.place.ask("GET", "/v1/nodes")
        assert code == 200, said
        listed = said["nodes"]
        return {each["name"]: each["address"] for each in listed if each["state"] != "lost"}

    def _resume_if_held(self) -> None:
        """Resume a held job, as an operator would: its instances are given back after a while."""
        code, said = self.place.ask("GET", "/v1/status")
        if code == 200 and (said["job"] is None or said["job"]["phase"]["name"] == "held"):
            self.place.ask("POST", "/v1/jobs/j/resume", {})

    def _trains(self) -> bool:
        job = self.place.status()["job"]  # Steps are done also while a better plan is searched.
        return bool(job and job["step"] and job["step_age_s"] < 2)

    def _targets(self, at_least: int) -> dict[str, str]:
        """Return what is wrong with each target, at best nothing.

        Waits until the job trains and the nodes are the rented instances, ``at_least`` of them:
        an instance that was killed just now is still a target.
        """
        found: dict[str, str] = {}

        def are_right() -> bool:
            self._resume_if_held()
            nodes, rented, known = self._nodes(), self._rented(), self.prometheus.targets()
            expected = {*nodes.values(), self.prometheus.head}
            found.clear()
            found.update(dict.fromkeys(expected, "not scraped") | dict(known))
            found.update(dict.fromkeys(known.keys() - expected, "not a node"))
            is_whole = set(nodes) == rented and len(rented) >= at_least
            return is_whole and not any(found.values()) and self._trains()

        try:
            wait_until(are_right, within_s=WAIT_S)
        except TimeoutError as error:
            found["all"] = f"no rest within {WAIT_S:.0f} s, {len(self._rented())} rented: {error}"
        return found

    def _give_all_back(self) -> None:
        self.place.ask("POST", "/v1/jobs/j/cancel", {})
        machines = self.folder / "machines"
        wait_until(lambda: not list(machines.glob("*/instance.json")), within_s=WAIT_S)
        wait_until(lambda: self.place.ask("GET", "/v1/goodput")[1]["gpus"] == 0, within_s=WAIT_S)
        wait_until(lambda: not self.prometheus.query("sailor_paid_gpus > 0"), within_s=WAIT_S)
        with suppress(TimeoutError):  # The ledger is stored some seconds later, and then scraped.
            wait_until(lambda: not self._unscraped(), within_s=30)

    def _unscraped(self) -> list[str]:
        causes = self.place.ask("GET", "/v1/goodput")[1]["causes"]
        return unlike(causes, self._scraped("gpu_seconds"), self._scraped("usd"))

    def _scraped(self, unit: str) -> dict[str, float]:
        return dict(self.prometheus.values(f"sailor_goodput_{unit}_total", "cause"))

    def _goodput(self) -> dict[str, Any]:
        done = subprocess.run(
            [*SAILORCTL, "goodput", "--json", "--server",
             f"unix://{self.place.socket}"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def _result(self, seconds: float, targets: dict[str, str]) -> Result:
        within, ask = f"{int(seconds) + 60}s", self.prometheus
        shrunk = {
            f"{name}{{{label}}}": times
            for name in ("sailor_goodput_gpu_seconds_total", "sailor_goodput_usd_total")
            for label, times in ask.values(f"resets({name}[{within}]) > 0", "cause").items()
        }
        gpu_s, usd = self.bill.sums()
        return Result(
            seconds,
            self.faults,
            len(self.bill.lives),
            gpu_s,
            usd,
            self._goodput(),
            self._scraped("gpu_seconds"),
            self._scraped("usd"),
            shrunk,
            targets,
            {name: why for name, why in ask.rules().items() if why},
            dict(ask.faults()),
            ask.fired(within),
        )


def report(result: Result) -> str:
    """Return the figures as text."""
    said = result.ledger
    gpu_s = sum(each["gpu_s"] for each in said["causes"]) - said["ahead_gpu_s"]
    usd = sum(each["usd"] for each in said["causes"]) - said["ahead_usd"]
    lines = [
        f"{result.seconds / 60:.1f} min, {result.instances} instances, {result.faults.total()} "
        f"faults: {', '.join(f'{n} {kind}' for kind, n in sorted(result.faults.items()))}",
        f"GPU time: causes {gpu_s:.3f} s, bill {result.bill_gpu_s:.3f} s, "
        f"off by {gpu_s / result.bill_gpu_s - 1:+.4%}",
        f"dollars: causes {usd:.4f}, bill {result.bill_usd:.4f}, off {usd - result.bill_usd:+.4f}",
        f"goodput {said['goodput']:.1%}; Prometheus: {len(result.targets)} targets; "
        f"fired: {', '.join(sorted(result.fired)) or 'none'}",
        *(f"  {each['cause']:<22}{each['gpu_s']:>12.1f} s {each['usd']:>9.4f}"
          for each in said["causes"]),
    ]  # fmt: skip
    return "\n".join(lines + [f"WRONG: {each}" for each in result.problems()])


def main() -> None:
    """Play a storm, print the figures, and fail if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        storm = LedgerStorm(Path(folder), random.Random(given.seed))
        result = storm.run(storm.at_random(given.minutes * 60))
    print(report(result))
    sys.exit(1 if result.problems() else 0)


if __name__ == "__main__":
    main()
