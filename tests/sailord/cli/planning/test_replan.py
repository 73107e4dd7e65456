"""The command ``replan``: nodes by name and by number, what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main

JOB = """
[model]
family = "llama"
layers = 4
hidden = 256
heads = 4
vocab = 512
[training]
global_batch = 16
sequence = 128
max_tp = 2
"""
CLUSTER = """
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 2
gpus = {gpus}
obtainable = 1
price_usd_per_gpu_hour = 3.0
"""
OTHERS = """
[[pool]]
zone = "us-central1-b"
gpu = "A100-40"
gpus_per_machine = 2
gpus = 4
price_usd_per_gpu_hour = 3.0
"""


def stage(first: int, end: int, **place: Any) -> dict[str, Any]:
    where = {"gpu": "A100-40", "machine": "A100-40x2", "zone": "us-central1-a"}
    return {"layers": [first, end], "tp": 1, **where, **place}


def two_nodes(**more: Any) -> dict[str, Any]:
    """Two pipelines, each on a node of its own, a device a stage."""
    pipelines = [
        {
            "micro_batches": 4,
            "stages": [
                stage(0, 3, node=name, devices=[0]),
                stage(3, 6, node=name, devices=[1]),
            ],
        }
        for name in ("node-a", "node-b")
    ]
    return {"micro_batch_size": 2, "pipelines": pipelines, **more}


def run(
    folder: Path,
    plan: dict[str, Any],
    *options: str,
    gpus: int = 4,
    cluster: str = CLUSTER,
    job: str = JOB,
) -> Result:
    files = {
        "plan.json": json.dumps(plan),
        "job.toml": job,
        "cluster.toml": cluster.replace("{gpus}", str(gpus)),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return CliRunner().invoke(main, ["replan", *(str(folder / name) for name in files), *options])


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def nodes(document: dict[str, Any]) -> set[str]:
    return {s["node"] for p in document["plan"]["pipelines"] for s in p["stages"]}


def test_a_lost_node_is_replaced_by_available_ones(tmp_path: Path) -> None:
    saved = tmp_path / "next.json"
    options = ("--lost", "node-a", "--json", "--save", str(saved))
    document = told(run(tmp_path, two_nodes(), *options, gpus=4))
    assert document["running"]["lost_nodes"] == ["node-a"]
    assert nodes(document) == {"node-b", "us-central1-a/A100-40x2/1"}
    assert document["verdict"]["moves"]
    assert "1 of 2 pipelines" in document["verdict"]["reason"]
    (transfer,) = document["moves"]["transfers"]
    assert (transfer["from"], transfer["to"]) == ("node-b", "us-central1-a/A100-40x2/1")
    assert transfer["bytes"] == document["moves"]["network_bytes"] > 0
    assert set(document["cost"]["phases"]) == {
        f"{name}_s"
        for name in ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")
    }
    cost = document["cost"]
    assert cost["downtime_s"] == pytest.approx(sum(cost["phases"].values()) - cost["trained_s"])
    assert json.loads(saved.read_text(encoding="utf-8")) == document["plan"]


def test_fewer_machines_take_the_last_by_name(tmp_path: Path) -> None:
    document = told(run(tmp_path, two_nodes(), "--json", gpus=2))
    assert document["running"]["lost_nodes"] == ["node-b"]
    assert nodes(document) == {"node-a"}
    assert document["moves"]["network_bytes"] == 0
    total = sum(p["micro_batches"] for p in document["plan"]["pipelines"])
    assert total * document["plan"]["micro_batch_size"] == 16


def test_a_plan_without_nodes_is_placed_first(tmp_path: Path) -> None:
    plan = two_nodes()
    for pipeline in plan["pipelines"]:
        for each in pipeline["stages"]:
            del each["node"], each["devices"]
    document = told(run(tmp_path, plan, "--json", gpus=2))
    assert document["running"]["lost_nodes"] == ["us-central1-a/A100-40x2/2"]
    assert nodes(document) == {"us-central1-a/A100-40x2/1"}


@pytest.mark.parametrize("obtainable", [0, 1])
def test_a_plan_without_nodes_ran_on_whole_machines(tmp_path: Path, obtainable: int) -> None:
    """Of two machines of two GPUs one lost a GPU: a stage on two GPUs did not run there."""
    pipelines = [
        {"micro_batches": 4, "stages": [{**stage(0, 6), "tp": 2}]} for _ in ("one", "other")
    ]
    cluster = CLUSTER.replace("obtainable = 1", f"obtainable = {obtainable}")
    plan = {"micro_batch_size": 2, "pipelines": pipelines}
    document = told(run(tmp_path, plan, "--json", gpus=3, cluster=cluster))
    assert document["running"]["lost_nodes"] == ["us-central1-a/A100-40x2/3"]
    assert nodes(document) <= {"us-central1-a/A100-40x2/1", "us-central1-a/A100-40x2/2"}


def test_a_deadline_that_is_not_checked_is_warned_of(tmp_path: Path) -> None:
    job = JOB.replace("max_tp", "steps = 10\nmax_tp")
    job += '[objective]\ndeadline = "2001-01-01T00:00:00Z"\n'
    for text, is_told in ((job, True), (JOB, False)):
        result = run(tmp_path, two_nodes(), "--json", gpus=2, job=text)
        assert result.exit_code == 0, result.stderr
        assert ("objective.deadline is not checked" in result.stderr) == is_told


def test_text_output_names_losses_transfers_and_downtime(tmp_path: Path) -> None:
    result = run(tmp_path, two_nodes(), gpus=2)
    assert result.exit_code == 0
    for word in (
        "lost        node-b",
        "transfers ",
        "downtime ",
        "verdict     move: 1 of 2",
        "search ",
    ):
        assert word in result.output


def test_a_reconfiguration_must_pay_off_within_the_nodes_lifetime(tmp_path: Path) -> None:
    options = ("--deep", "--json")
    long = told(run(tmp_path, two_nodes(), *options, gpus=16))
    short = told(run(tmp_path, two_nodes(), *options, "--life", "0.01", gpus=16))
    assert long["plan"] == short["plan"]
    assert long["verdict"]["moves"]
    assert not short["verdict"]["moves"]


def test_a_lost_zone_may_be_missing_from_the_cluster_file(tmp_path: Path) -> None:
    document = told(run(tmp_path, two_nodes(), "--json", cluster=OTHERS))
    assert document["running"]["lost_nodes"] == ["node-a", "node-b"]
    assert {name.split("/")[0] for name in nodes(document)} == {"us-central1-b"}
    assert document["moves"]["network_bytes"] == 0
    assert document["moves"]["restored_bytes"] > 0
    assert document["moves"]["lost_layers"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [(), ("--deep",)])
def test_a_lost_zone_of_unknown_price_is_left_for_the_goal_cost(tmp_path: Path, options) -> None:
    priced = JOB + '[objective]\ngoal = "cost"\n'
    document = told(run(tmp_path, two_nodes(), "--json", *options, cluster=OTHERS, job=priced))
    assert {name.split("/")[0] for name in nodes(document)} == {"us-central1-b"}


@pytest.mark.parametrize("options", [(), ("--lost", "node-b")])
def test_nodes_of_two_contracts_have_their_own_prices(tmp_path: Path, options) -> None:
    """One machine of two GPUs on demand at $3 each, one on spot at $1: also the lost one was."""
    spot = CLUSTER.replace("3.0", "1.0") + "spot = true\n"
    document = told(run(tmp_path, two_nodes(), "--json", *options, gpus=2, cluster=CLUSTER + spot))
    running, estimate = document["running"], document["estimate"]
    hourly = running["cost_usd_per_iteration"] / running["iteration_s"] * 3600
    assert hourly == pytest.approx(2 * 3.0 + 2 * 1.0)
    assert estimate["cost_usd_per_hour"] == pytest.approx(2 * 3.0 + 2 * 1.0)


def test_no_plan_if_no_node_is_up(tmp_path: Path) -> None:
    result = run(tmp_path, two_nodes(), gpus=0)
    assert result.exit_code == 1
    assert "no node is up" in result.stderr
    assert result.stdout == ""


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    result = run(tmp_path, two_nodes(), "--lost", "node-c", "--lost", "node-d")
    assert result.exit_code == 2
    assert '"node-c"' in result.stderr
    assert '"node-d"' in result.stderr
    assert 'did you mean "node-' in result.stderr
    half = two_nodes()
    del half["pipelines"][0]["stages"][0]["node"], half["pipelines"][0]["stages"][0]["devices"]
    result = run(tmp_path, half)
    assert result.exit_code == 2
    assert "some stages only" in result.stderr
    elsewhere = two_nodes()
    elsewhere["pipelines"][0]["stages"][0]["zone"] = "us-east1-b"
    result = run(tmp_path, elsewhere)
    assert result.exit_code == 2
    assert "node-a" in result.stderr or "us-east1-b" in result.stderr
    result = run(tmp_path, two_nodes(schedule="gpipe"))
    assert result.exit_code == 2
    assert "gpipe" in result.stderr
    batch = two_nodes()
    batch["micro_batch_size"] = 3
    result = run(tmp_path, batch)
    assert result.exit_code == 2
    assert "global batch" in result.stderr
    result = run(tmp_path, two_nodes(), "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    result = run(tmp_path, two_nodes(), "--life", "nan")
    assert result.exit_code == 2
    assert "nan is not a finite number" in result.stderr


@pytest.mark.parametrize("objective", ['goal = "cost"', "max_usd_per_hour = 100.0"])
def test_dollars_need_the_price_of_every_pool_that_is_up(tmp_path: Path, objective: str) -> None:
    other = OTHERS.replace("A100-40", "RTX-3090").replace("price_usd_per_gpu_hour = 3.0\n", "")
    job = f"{JOB}\n[objective]\n{objective}\n"
    result = run(tmp_path, two_nodes(), "--lost", "node-a", cluster=CLUSTER + other, job=job)
    assert result.exit_code == 2, result.output
    assert "no price is known for RTX-3090@us-central1-b" in result.stderr
