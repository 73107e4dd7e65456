"""Alert rules, dashboard and metrics: they name what exists, and promtool takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.control.cluster import Cluster
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "observability"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SOURCES = (
    "sailord/api/handlers/metrics.py",
    "sailord/api/handlers/context.py",
    "sailord/controller/durations.py",
    "agents/metrics.py",
)
HISTOGRAMS = ("sailor_decision_seconds", "sailor_event_to_decision_seconds",
              "sailor_http_request_seconds",
              "sailor_reconfiguration_downtime_seconds")  # fmt: skip
ALERTS = re.findall(r"- alert: (\w+)", (EXAMPLES / "alerts.yml").read_text(encoding="utf-8"))

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool in the PATH (apt-get install prometheus)"
)


def known() -> set[str]:
    """The names of all metrics that the sources make."""
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in SOURCES)
    found = set(re.findall(r'"(sailor_[a-z_]+)"', text))
    return found | {f"{name}_{end}" for name in HISTOGRAMS for end in ("bucket", "count", "sum")}


def named(expressions: str) -> set[str]:
    return set(re.findall(r"\bsailor_[a-z_]+", expressions))


def checked(*command: str, text: str | None = None) -> None:
    done = subprocess.run(
        command, cwd=EXAMPLES, input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    rules = (EXAMPLES / "alerts.yml").read_text(encoding="utf-8")
    queries = "\n".join(queries_of_the_dashboard())
    asked = named("\n".join(re.findall(r"expr: (.*)", rules))) | named(queries)
    assert len(asked) > 40
    assert asked <= known(), asked - known()


def test_every_metric_is_documented() -> None:
    plain = {name for name in known() if not name.endswith(("_bucket", "_count", "_sum"))}
    assert {name for name in plain if f"`{name}`" not in OPERATIONS + CAPACITY} == set()


CAPACITY = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")


def test_every_alert_has_an_entry_in_the_operators_book_and_a_test() -> None:
    tested = (EXAMPLES / "alerts.test.yml").read_text(encoding="utf-8")
    for alert in ALERTS:
        assert f"| `{alert}` |" in OPERATIONS, alert
        assert f"- name: {alert}\n" in tested, alert


@promtool
def test_promtool_accepts_the_rules_and_each_fires_where_it_should() -> None:
    checked("promtool", "check", "rules", "alerts.yml")
    checked("promtool", "test", "rules", "alerts.test.yml")


GRAFANA = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
"""What Grafana replaces in queries."""


def queries_of_the_dashboard() -> list[str]:
    board = json.loads((EXAMPLES / "dashboard.json").read_text(encoding="utf-8"))
    queries = [each["expr"] for panel in board["panels"] for each in panel["targets"]]
    return queries + [each["expr"] for each in board["annotations"]["list"]]


@promtool
def test_promtool_accepts_each_query_of_the_dashboard(tmp_path: Path) -> None:
    known = re.compile("|".join(map(re.escape, GRAFANA)))
    rules = [
        {"record": f"query:{number}", "expr": known.sub(lambda found: GRAFANA[found[0]], query)}
        for number, query in enumerate(queries_of_the_dashboard())
    ]
    file = tmp_path / "queries.json"  # JSON is YAML, too.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked("promtool", "check", "rules", str(file))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("observed")
    made = Cluster(folder, [Place(folder)])
    try:
        made.begin("a", "b")
        yield made
    finally:
        made.end()


def booked(cluster: Cluster) -> dict[str, float]:
    """GPU seconds by cause."""
    return {c["cause"]: c["gpu_s"] for c in cluster.head.ask("GET", "/v1/goodput")[1]["causes"]}


def stored_after(cluster: Cluster, training_gpu_s: float) -> str:
    """The metrics, once the ledger was stored with more training than that."""
    text: str = cluster.head.ask("GET", "/metrics")[1]
    cause = 'sailor_goodput_gpu_seconds_total{cause="training"}'
    return text if figures(text).get(cause, 0.0) > training_gpu_s else ""


def figures(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(sailor\S+) (\S+)$", text, re.M)}


@promtool
@pytest.mark.slow
def test_metrics_of_a_running_cluster_follow_the_conventions_and_agree_with_the_api(
    cluster: Cluster,
) -> None:
    cluster.wait_steps(5)
    wait_until(lambda: "training" in booked(cluster))
    before = booked(cluster)
    text = wait_until(lambda: stored_after(cluster, before["training"]))
    after = booked(cluster)
    checked("promtool", "check", "metrics", text=text)
    found = figures(text)
    for cause, least in before.items():
        if cause != "step_under_way":
            seconds = found[f'sailor_goodput_gpu_seconds_total{{cause="{cause}"}}']
            assert least <= seconds <= after[cause], cause
    told = cluster.head.ask("GET", "/v1/goodput")[1]
    job = told["jobs"][0]
    assert job["name"] == cluster.head.status()["job"]["id"]
    # No other job has trained.
    whole, part = 'gpu_seconds_total{cause="training"}', f'",job="{job["name"]}"}}'
    of_job = f"sailor_goodput_job_{whole}".replace('"}', part)
    assert found[of_job] == found[f"sailor_goodput_{whole}"]
    for kind in ("days", "jobs"):
        gpu_s = sum(each["gpu_s"] for each in told[kind])
        assert gpu_s == pytest.approx(sum(each["gpu_s"] for each in told["causes"]))
    assert found['sailor_job_phase{phase="running"}'] == 1
    assert found["sailor_elections_total"] == 1
    assert found["sailor_decision_seconds_count"] > 0
    assert found['sailor_http_request_seconds_count{route="goodput",status="200"}'] > 0
    nodes = cluster.head.ask("GET", "/v1/nodes")[1]["nodes"]
    with urllib.request.urlopen(f"http://{nodes[0]['address']}/metrics") as reply:
        agents = reply.read().decode()
    checked("promtool", "check", "metrics", text=agents)
    assert figures(agents)['sailor_agent_taking{taking="running"}'] == 1
