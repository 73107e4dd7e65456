"""A real Prometheus with the configuration and rules that we ship, and its HTTP API."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sailord.local.paths import free_port
from tests.processes import wait_until
from tests.sailord.daemon.running import TOKEN

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "observability"
FAULTS = (
    "prometheus_rule_evaluation_failures_total",
    "prometheus_target_scrapes_exceeded_sample_limit_total",
    "prometheus_target_scrapes_sample_duplicate_timestamp_total",
    "prometheus_target_scrapes_sample_out_of_bounds_total",
    "prometheus_target_scrapes_sample_out_of_order_total",
)
"""What Prometheus counts of itself when the samples of a scrape, or a rule, are at fault."""


@dataclass(eq=False)
class Prometheus:
    """One process, with its data in a folder."""

    folder: Path
    head: str
    """Address of sailord."""

    def start(self) -> None:
        """Start it with what `examples/observability` holds, scraping every second."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "token").write_text(TOKEN)
        config = (EXAMPLES / "prometheus.yml").read_text(encoding="utf-8")
        for ours, here in (
            ("/etc/prometheus/sailor-token", str(self.folder / "token")),
            ("head.internal:7077", self.head),
            ("scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s"),
            ("refresh_interval: 15s", "refresh_interval: 1s"),
            ("[alerts.yml]", json.dumps([str(EXAMPLES / "alerts.yml")])),
        ):
            assert ours in config, ours
            config = config.replace(ours, here)
        file = self.folder / "prometheus.yml"
        file.write_text(config)
        done = subprocess.run(["promtool", "check", "config", file], capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        self.port = free_port()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={self.folder}/data",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(lambda: self.query("1"))

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str, **asked: str) -> Any:
        """Return an answer's data."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the series that an expression selects now."""
        data = self.ask("query", query=expression)
        return [data["result"]] if data["resultType"] == "scalar" else list(data["result"])

    def values(self, expression: str, label: str) -> Mapping[str, float]:
        """Return the values of an expression by one label."""
        return {each["metric"][label]: float(each["value"][1]) for each in self.query(expression)}

    def targets(self) -> Mapping[str, str]:
        """Return the last error of each target; empty: it is up."""
        return {
            each["labels"]["instance"]: each["lastError"] or ("", "down")[each["health"] == "down"]
            for each in self.ask("targets", state="active")["activeTargets"]
        }

    def rules(self) -> Mapping[str, str]:
        """Return the last error of each rule; empty: none."""
        (group,) = self.ask("rules")["groups"]
        return {each["name"]: each.get("lastError", "") for each in group["rules"]}

    def fired(self, within: str) -> frozenset[str]:
        """Return the alerts that fired at any time."""
        found = self.query(f'count_over_time(ALERTS{{alertstate="firing"}}[{within}])')
        return frozenset(each["metric"]["alertname"] for each in found)

    def faults(self) -> Mapping[str, float]:
        """Return what it counts of itself that is not zero."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for name in FAULTS:
            values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)
            assert values, name
            found[name] = sum(map(float, values))
        return {name: value for name, value in found.items() if value}
