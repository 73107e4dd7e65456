"""The command ``plan``: what it prints, what it saves, and how it ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.api import SPOT_FIRST, plan_job
from planner.compare.registry import BASELINES
from planner.move_policy.deadline_outlook import spot_availability
from planner.problem.question import STOPPED, Answer, Question
from sailord.cli.main import main
from sailord.cli.planning.host_memory import HostMemory
from sailord.cli.planning.question import seconds_left
from simulator.cluster.cluster import Pool
from simulator.documents.problems import InputError
from simulator.inputs.plan_file import load_plan
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.traces.trace import trace_of

JOB = """
[model]
family = "llama"
layers = 4
hidden = 256
heads = 4
vocab = 512
[training]
global_batch = 8
sequence = 128
max_tp = 2
{training}
[objective]
{objective}
"""
CLUSTER = """
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 2
gpus = 4
price_usd_per_gpu_hour = 3.0
"""


def run(
    folder: Path,
    *options: str,
    objective: str = "",
    training: str = "",
    pools: str = CLUSTER,
    job: str = JOB,
) -> Result:
    files = folder / "job.toml", folder / "cluster.toml"
    files[0].write_text(job.format(objective=objective, training=training), encoding="utf-8")
    files[1].write_text(pools, encoding="utf-8")
    return CliRunner().invoke(main, ["plan", *map(str, files), *options])


def test_json_output_has_plan_estimate_and_error_bars(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = run(tmp_path, "--json", "--save", str(saved))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["estimate"]["estimator"] == "event"
    assert document["estimate"]["throughput_samples_per_s"] > 0
    assert (
        sum(p["micro_batches"] for p in document["plan"]["pipelines"])
        * document["plan"]["micro_batch_size"]
        == 8
    )
    assert {"seconds", "evaluations", "lower_bound_s", "gap"} <= set(document["search"])
    assert 0 <= document["search"]["gap"] < 1
    assert sum(document["gpus_used"].values()) <= 4
    assert json.loads(saved.read_text(encoding="utf-8")) == document["plan"]
    again = CliRunner().invoke(
        main,
        [
            "simulate",
            str(saved),
            str(tmp_path / "job.toml"),
            str(tmp_path / "cluster.toml"),
            "--json",
        ],
    )
    assert again.exit_code == 0
    assert json.loads(again.stdout)["iteration_s"] == document["estimate"]["iteration_s"]


def test_text_output_has_a_table_and_reasons(tmp_path: Path) -> None:
    result = run(tmp_path, "--explain")
    assert result.exit_code == 0
    assert "bottleneck" in result.output
    assert (
        "over the searched space (1F1B, one micro batch size, unsplit stages, placed by rule); gap"
        in result.output
    )


def test_no_plan_says_which_limit_to_relax(tmp_path: Path) -> None:
    result = run(tmp_path, objective="max_usd_per_iteration = 1e-12")
    assert result.exit_code == 1
    assert "max_usd_per_iteration" in result.stderr
    assert result.stdout == ""


def test_unknown_names_are_mistakes(tmp_path: Path) -> None:
    assert run(tmp_path, "--estimator", "unknown").exit_code == 2
    assert run(tmp_path, "--planner", "unknown").exit_code == 2
    assert run(tmp_path, "--estimator", "paper").exit_code == 2


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = run(tmp_path_factory.mktemp("ours"), "--json", "--prefer", "fastest")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", BASELINES)
def test_every_planner_of_the_literature_plans_in_the_same_form(
    tmp_path: Path, ours: dict[str, Any], name: str
) -> None:
    saved = tmp_path / "plan.json"
    result = run(tmp_path, "--planner", name, "--json", "--save", str(saved))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(ours) <= set(document)
    assert document["planner"] == name
    assert set(document["search"]) == set(ours["search"])
    assert document["search"]["lower_bound_s"] is None
    assert document["search"]["evaluations"] == 1 + sum(document["passed_over"].values())
    assert document["plan"] == json.loads(saved.read_text(encoding="utf-8"))
    assert document["estimate"]["iteration_s"] >= ours["estimate"]["iteration_s"] * (1 - 1e-9)


@pytest.mark.slow
def test_what_is_preferred_comes_from_the_job_and_the_command(tmp_path: Path) -> None:
    """Two T4 are 1.3 % faster than one, for twice the dollars."""
    pools, job = CLUSTER.replace("A100-40", "T4"), JOB.replace("batch = 8", "batch = 12")
    for options, objective in (
        (("--prefer", "fastest"), ""),
        ((), 'prefer = "fastest"'),
        (("--gap", "50%"), ""),
        (("--prefer", "fastest"), 'prefer = "simple"'),
    ):
        result = run(tmp_path, "--json", *options, objective=objective, pools=pools, job=job)
        found = json.loads(result.stdout)
        assert found["gpus_used"] == {"T4@us-central1-a": 2}, options
        assert found["best_by_estimate"] is None
    simple = json.loads(run(tmp_path, "--json", pools=pools, job=job).stdout)
    assert simple["gpus_used"] == {"T4@us-central1-a": 1}
    best = simple["best_by_estimate"]
    assert best["iteration_s"] == found["estimate"]["iteration_s"]
    assert 0 < best["loses"] < 0.02 < best["error"]
    assert best["saves"] > 0.45
    text = run(tmp_path, "--explain", pools=pools, job=job).stdout
    assert f"% slower than the fastest plan, {best['iteration_s']:.4g} s, ±" in text
    assert f"cannot be told apart; {best['saves']:.1%}" in text
    assert "(--prefer fastest takes that plan)" in text


def test_simple_needs_error_bars_and_no_gap(tmp_path: Path) -> None:
    result = run(tmp_path, "--prefer", "simple", "--gap", "5%")
    assert result.exit_code == 2
    assert "--prefer" in result.stderr


SPOT = CLUSTER + "spot = true\n"


def test_spot_in_every_pipeline_is_warned_of(tmp_path: Path) -> None:
    text = run(tmp_path, pools=SPOT).stdout
    assert "spot nodes are in every pipeline: a loss every 60 min takes" in text
    assert "hits all pipelines at once" in text
    assert "(losses assumed)" in text
    lost = json.loads(run(tmp_path, "--json", pools=SPOT).stdout)["spot_losses"]
    assert lost["losses_per_s"] == pytest.approx(1 / 3600)
    assert 0 < lost["all_lost_per_s"] <= lost["losses_per_s"]
    assert 0 < lost["down_s"] <= lost["restore_s"]
    assert lost["expected_samples_per_s"] < lost["samples_per_s"]
    assert json.loads(run(tmp_path, "--json").stdout)["spot_losses"] is None


@pytest.mark.parametrize("options", [(), ("--planner", "piper")])
def test_a_plan_that_is_paid_as_spot_is_warned_of_as_on_spot(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """On demand there are nodes, too, and the limit allows no plan on them."""
    pools = CLUSTER + SPOT.replace("3.0", "1.0").replace("gpus = 4", "gpus = 8")
    result = run(tmp_path, "--json", *options, pools=pools, objective="max_usd_per_hour = 2.5")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["estimate"]["cost_usd_per_hour"] <= 2.5
    assert SPOT_FIRST in found["estimate"]["notes"]
    assert found["spot_losses"] is not None


def test_memory_for_snapshots_is_shown_and_too_little_is_warned_of(tmp_path: Path) -> None:
    shown = json.loads(run(tmp_path, "--json").stdout)["host_memory"]
    assert shown["needed_bytes"] > 0
    text = run(tmp_path).stdout
    assert re.search(rf"^snapshots   [\d.,]+ [KMG]iB .*of memory on {shown['node']}$", text, re.M)
    short = HostMemory("a/m/1", "m", needed=5 * 2**30, available=4 * 2**30)
    assert short.lines == (
        "snapshots   5 GiB of 4 GiB of memory on a/m/1",
        "warning     m has too little memory for its snapshots: the job will not start",
    )
    assert replace(short, available=None).lines == ("snapshots   5 GiB of memory on a/m/1",)


def test_losses_of_a_trace_replace_the_assumed_ones(tmp_path: Path) -> None:
    trace = tmp_path / "trace.toml"
    events = (f"[[event]]\ntime_s = {600 * n}\ngpus = {4 - 2 * (n % 2)}\n" for n in range(12))
    trace.write_text("end_s = 7200\n" + "".join(events), encoding="utf-8")
    result = run(tmp_path, "--json", "--trace", str(trace), pools=SPOT)
    assert result.exit_code == 0, result.output
    lost = json.loads(result.stdout)["spot_losses"]
    # Six losses in two hours, instead of one an hour.
    assert 2 / 3600 < lost["losses_per_s"] < 4 / 3600


def test_a_planner_without_a_plan_says_what_it_passed_over(tmp_path: Path) -> None:
    result = run(tmp_path, "--planner", "varuna", objective="max_usd_per_iteration = 1e-12")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "max_usd_per_iteration" in result.stderr
    assert "beyond limits" in result.stderr


def test_a_plan_is_drawn_beside_its_text_output(tmp_path: Path) -> None:
    for planner in ("sailor", "whale"):
        picture = tmp_path / f"{planner}.svg"
        result = run(tmp_path, "--planner", planner, "--plot", str(picture))
        assert result.exit_code == 0, result.output
        assert "<svg" in picture.read_text(encoding="utf-8")
        assert "search      " in result.output
    job = tmp_path / "job.toml"
    assert run(tmp_path, "--plot", str(job)).exit_code == 2, "would be overwritten"


def test_unwritable_outputs_are_refused_by_name(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "plan.json"
    for options, what in (
        (("--save", str(tmp_path)), f"{tmp_path}: is a directory"),
        (("--save", str(nowhere)), f"{nowhere}: cannot be written: No such file"),
        (("--plot", str(tmp_path / "plan.pdf")), 'cannot be a ".pdf" file'),
    ):
        # There is no such planner: what is refused was refused before anything was read.
        result = run(tmp_path, *options, "--planner", "unknown")
        assert result.exit_code == 2
        assert what in result.stderr


# -- the deadline ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_deadline_is_read_against_the_clock(tmp_path: Path) -> None:
    far = 'deadline = "2999-01-01T00:00:00Z"'
    assert run(tmp_path, objective=far, training="steps = 10").exit_code == 0
    past = 'deadline = "2001-01-01T00:00:00Z"'
    result = run(tmp_path, objective=past, training="steps = 10")
    assert result.exit_code == 1
    assert "objective.deadline: has passed" in result.stderr
    assert "move it by" in result.stderr
    assert "days" in result.stderr
    years = run(tmp_path, objective=far, training="steps = 100000000000000")
    assert years.exit_code == 1
    assert "objective.deadline: is" in years.stderr
    endless = run(tmp_path, objective=far)
    assert endless.exit_code == 2
    assert "training.steps" in endless.stderr


def test_time_left_ends_at_the_deadline() -> None:
    at = "2030-01-01T00:01:00+00:00"
    job = Job("timed", preset("opt-125m"), 8, 128, steps=5, objective=Objective(deadline=at))
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert seconds_left(job, now) == 60.0
    assert seconds_left(replace(job, objective=Objective()), now) is None
    with pytest.raises(InputError, match=r"training\.steps"):
        seconds_left(replace(job, steps=None), now)


TWO_POOLS = "".join(
    f'[[pool]]\nzone = "us-central1-a"\ngpu = "A100-40"\ngpus_per_machine = 1\ngpus = 2\n'
    f"spot = {spot}\nprice_usd_per_gpu_hour = {usd}\n"
    for spot, usd in (("false", 3.0), ("true", 1.0))
)
"""On demand, and spot."""


def test_the_answer_says_whether_the_deadline_is_met_and_what_a_mixture_costs(
    tmp_path: Path,
) -> None:
    due = datetime.now(UTC) + timedelta(days=20)
    objective = f'deadline = "{due:%Y-%m-%dT%H:%M:%SZ}"'
    result = run(tmp_path, "--json", objective=objective, training="steps = 100", pools=TWO_POOLS)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    told, estimate = found["deadline"], found["estimate"]
    assert told["is_met"]
    assert told["run_s"] == pytest.approx(100 * estimate["iteration_s"])
    assert told["slack_s"] == pytest.approx(told["seconds_left"] - told["run_s"])
    assert told["usd"] == pytest.approx(100 * estimate["cost_usd_per_iteration"])
    mix = told["mixture"]
    assert list(mix) == ["spot_share", "expected_usd", "most_usd", "is_guaranteed"]
    assert mix["spot_share"] == 0.5
    # Half of 20 days is more than the job needs: spot alone, at a third of the price.
    assert mix["expected_usd"] == pytest.approx(mix["most_usd"] / 3)
    assert mix["is_guaranteed"]
    text = run(tmp_path, objective=objective, training="steps = 100", pools=TWO_POOLS).output
    assert "deadline    in 20.0 days: met, " in text
    assert "mixture     spot while there is any" in text
    assert "if spot is there 50% of the time, at most" in text


@pytest.mark.parametrize("stops", ["the outlook", "the search"])
def test_an_interruption_after_the_plan_was_found_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    asked = []

    def interrupted(*_: object) -> None:
        asked.append("outlook")
        raise KeyboardInterrupt

    def stopped(question: Question) -> Answer:
        return replace(plan_job(question), note=STOPPED)

    monkeypatch.setattr("sailord.cli.planning.plan.deadline_outlook", interrupted)
    if stops == "the search":
        monkeypatch.setattr("sailord.cli.planning.plan.plan_job", stopped)
    due = datetime.now(UTC) + timedelta(days=20)
    objective = f'deadline = "{due:%Y-%m-%dT%H:%M:%SZ}"'
    saved = tmp_path / "plan.toml"
    result = run(tmp_path, "--save", str(saved), objective=objective, training="steps = 100")
    assert result.exit_code == 0, result.output
    assert load_plan(saved).micro_batch_size
    assert "search      " in result.output
    # After an interrupted search, none follows.
    assert (asked, "stopped before its end" in result.output) == (
        ["outlook"] if stops == "the outlook" else [],
        True,
    )


def test_a_mixture_counts_on_the_spot_machines_of_the_trace(tmp_path: Path) -> None:
    pools = tuple(
        Pool("us-central1-a", "A100-40", "A100-40x1", 1, 2, spot=spot) for spot in (False, True)
    )
    points = [(0.0, (2, 2)), (100.0, (2, 1)), (300.0, (2, 0))]
    past = trace_of("past", iter(points), 400.0)
    assert spot_availability(past, pools) == pytest.approx((2 * 100 + 200) / 2 / 400)
    assert spot_availability(past, pools[:1]) == 0
    due = datetime.now(UTC) + timedelta(minutes=10)
    objective = f'deadline = "{due:%Y-%m-%dT%H:%M:%SZ}"'
    trace = tmp_path / "past.toml"
    trace.write_text("end_s = 400\n[[event]]\ntime_s = 40\nspot = true\ngpus = 0\n")
    given = {"objective": objective, "training": "steps = 100", "pools": TWO_POOLS}
    told = run(tmp_path, "--trace", str(trace), **given).output
    assert "if spot is there 10% of the time (as in past), at most" in told


LARGE = """
model.preset = "opt-6.7b"
[training]
global_batch = 16
sequence = 2048
precision = "bf16"
"""
MACHINE = '[[pool]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-8g"\nmachines = 1\n'


@pytest.mark.slow
def test_a_plan_with_chunks_says_so_and_names_the_layers_of_each(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    options = ("--allow", "interleaved", "--budget", "40", "--save", str(saved))
    result = run(tmp_path, *options, job=LARGE, pools=MACHINE)
    assert result.exit_code == 0, result.output
    plan = load_plan(saved)
    assert f", {plan.virtual_stages} chunks each, micro batch 1" in result.output
    (*_, last) = plan.pipelines[0].stages
    first = plan.pipelines[0].stages[plan.group_count(plan.pipelines[0]) - 1]
    layers = f"{first.layers[0]}-{first.layers[1] - 1}, "
    assert re.search(
        rf" {layers}.*{last.layers[0]}-{last.layers[1] - 1} +A100-40 x1", result.output
    )
    assert "the plan itself has chunks, and is outside)" in result.output
    assert "\nsnapshots   " in result.output, "its nodes are known"


@pytest.mark.slow
def test_a_plan_with_divided_backwards_says_what_they_bring_and_that_none_runs_them(
    tmp_path: Path,
) -> None:
    saved = tmp_path / "plan.json"
    options = ("--allow", "zero-bubble", "--budget", "40", "--save", str(saved))
    few = LARGE.replace("global_batch = 16", "global_batch = 8")
    result = run(tmp_path, *options, job=few, pools=MACHINE)
    assert result.exit_code == 0, result.output
    assert load_plan(saved).schedule == "zero-bubble"
    assert "zero-bubble, micro batch 1" in result.output
    assert re.search(
        r"tried       zero-bubble: \S+ s instead of \S+ s \(-\d+\.\d%\); such plans cannot be"
        " submitted: no runtime runs them yet",
        result.output,
    )
    assert "1F1B and zero-bubble, one micro batch size" in result.output
    document = json.loads(run(tmp_path, *options, "--json", job=few, pools=MACHINE).stdout)
    (gain,) = document["tried"]
    assert gain["taken"]
    assert gain["objective"] < gain["without"]
    assert document["plan"]["schedule"] == "zero-bubble"


@pytest.mark.slow
def test_a_plan_with_the_other_zero_stage_says_which_and_where_to_set_it(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    tight = 'model.preset = "opt-1.3b"\n[training]\nglobal_batch = 32\nsequence = 1024\n'
    tight += 'precision = "fp16"\nmax_tp = 1\n'
    machine = '[[pool]]\nzone = "us-central1-a"\nmachine = "n1-standard-64-v100-8"\nmachines = 1\n'
    options = ("--allow", "zero1", "--budget", "40", "--save", str(saved))
    result = run(tmp_path, *options, job=tight, pools=machine)
    assert result.exit_code == 0, result.output
    assert load_plan(saved).zero == 1
    assert ", with ZeRO-1, micro batch 2" in result.output
    assert "ZeRO-1 on or off" in result.output
    assert "training.zero: change it in the job" in result.output


FAR = """
model.preset = "gpt2"
[training]
global_batch = 64
sequence = 1024
precision = "fp16"
max_tp = 1
"""
APART = "".join(
    f'[[pool]]\nzone = "{zone}"\ngpu = "V100-16"\ngpus_per_machine = 4\ngpus = 4\n'
    "price_usd_per_gpu_hour = 2.0\n"
    for zone in ("us-central1-a", "europe-west4-a")
)


def test_a_plan_with_outer_steps_says_how_often_and_what_they_change(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    options = ("--allow", "outer-steps", "--outer-every", "50", "--budget", "12")
    result = run(tmp_path, *options, "--save", str(saved), job=FAR, pools=APART)
    assert result.exit_code == 0, result.output
    assert load_plan(saved).outer_every == 50
    assert "8 pipelines, in 2 groups with an outer step every 50 iterations" in result.output
    assert "note        with outer steps the loss is not that of data parallel" in result.output
    assert "with outer steps or without); gap" in result.output
    assert "no runtime takes outer steps yet; the loss would differ" in result.output


def test_what_is_not_modelled_with_outer_steps_is_left_out(tmp_path: Path) -> None:
    options = ("--allow", "outer-steps", "--outer-every", "50", "--budget", "12", "--json")
    pools = APART.replace("gpus = 4\nprice", "gpus = 4\nspot = true\nprice")
    result = run(tmp_path, *options, job=FAR, pools=pools)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["plan"]["outer_every"] == 50
    assert (document["host_memory"], document["spot_losses"]) == (None, None)


@pytest.mark.parametrize("options", [("--allow", "outer-steps"), ("--outer-every", "50")])
def test_outer_steps_are_asked_for_with_their_number(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = run(tmp_path, *options)
    assert result.exit_code == 2
    assert "give both: --allow outer-steps --outer-every 50" in result.output


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "zero1"])
def test_what_no_estimator_judges_cannot_be_allowed(tmp_path: Path, name: str) -> None:
    result = run(tmp_path, "--allow", name, "--estimator", "paper")
    assert result.exit_code == 2
    assert "--allow: works under the event estimator only" in result.output
