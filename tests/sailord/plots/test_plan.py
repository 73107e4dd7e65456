"""Pictures show all parts of a plan, are the same every time, and fail with an error."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sailord.plots import timeline
from sailord.plots.panels import (
    KIND_COLOURS,
    PART_COLOURS,
    SLICES_MAX,
    PanelRow,
    draw_schedule,
    money_sentence,
    slices_of,
    windows_of,
)
from sailord.plots.plan import LANES_MAX, write_plot
from sailord.plots.timeline import Bar, Lane, Row
from simulator.documents.problems import InputError
from simulator.estimate.result import DeviceMemory, Estimate, Money
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan
from tests.conftest import ROOT
from tests.simulator.worlds import place, small_model, stage, world_of

NEAR, FAR = place(), place("A100-40", "europe-west4-a")
JOB = Job(name="small", model=small_model(), global_batch=8, sequence=128, max_tp=4)


def two_stages(micro_batches, *, where=NEAR):
    return Pipeline(micro_batches, (stage(0, 3, where, tp=2), stage(3, 6, where)))


PLAN = Plan(2, (two_stages(3), two_stages(4, where=FAR), two_stages(3)))


@pytest.fixture(scope="module")
def judge():
    return world_of(JOB).estimator


@dataclass(frozen=True)
class Formula:
    """An estimator that knows no schedule."""

    result: Estimate
    name: str = "formula"

    def estimate(self, plan: Plan) -> Estimate:
        assert plan is not None
        return self.result


def texts(path):
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def drawn(judge, tmp_path, *, plan=PLAN, estimate=None):
    path = tmp_path / "plan.svg"
    write_plot(plan, estimate or judge.estimate(plan), judge, path)
    return "\n".join(texts(path)), path.read_text()


def test_the_svg_names_every_pipeline_and_stage(judge, tmp_path):
    said, source = drawn(judge, tmp_path)
    for text in (
        "pipeline 0 (x2): 3 micro batches of 2",
        "pipeline 1: 4 micro batches of 2",
        "stage 0: layers 0-2",
        "stage 1: layers 3-5",
        "V100-16 x2 in us-central1-a",
        "A100-40 x1 in europe-west4-a",
        "gradient sync",
        "activations",
        "us-central1-a -> europe-west4-a egress",
        "V100-16@us-central1-a compute",
    ):
        assert text in said
    assert "pipeline 2" not in said
    assert all(colour.lower() in source for colour in KIND_COLOURS.values())


def test_the_suffix_png_selects_the_format(judge, tmp_path):
    path = tmp_path / "plan.PNG"
    write_plot(PLAN, judge.estimate(PLAN), judge, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) == 1200


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_plan_gives_the_same_bytes(suffix, judge, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.sailord.plots.test_plan import *\n"
        "judge = world_of(JOB).estimator\n"
        "write_plot(PLAN, judge.estimate(PLAN), judge, Path(sys.argv[1]))"
    )
    here, there = tmp_path / f"here.{suffix}", tmp_path / f"there.{suffix}"
    write_plot(PLAN, judge.estimate(PLAN), judge, here)
    subprocess.run([sys.executable, "-c", code, str(there)], cwd=ROOT, check=True)
    assert here.read_bytes() == there.read_bytes()


def test_excess_memory_is_shown_in_gib(judge, tmp_path):
    estimate = judge.estimate(PLAN)
    first = estimate.memory[0][0]
    tight = replace(first, capacity=first.total - 1.5 * 2**30)
    full = replace(estimate, memory=((tight, *estimate.memory[0][1:]), *estimate.memory[1:]))
    said, _ = drawn(judge, tmp_path, estimate=full)
    assert "1.5 GiB too much" in said
    assert "DOES NOT FIT" in said
    assert "too much" not in drawn(judge, tmp_path)[0]


def test_parts_of_memory_have_distinct_colours():
    parts = [item.name for item in fields(DeviceMemory) if item.name != "capacity"]
    assert list(PART_COLOURS) == parts
    assert len(set(PART_COLOURS.values())) == len(parts)


def test_more_pipelines_than_fit_are_counted(judge, tmp_path):
    plan = Plan(2, tuple(two_stages(count) for count in range(1, LANES_MAX + 4)))
    said, _ = drawn(judge, tmp_path, plan=plan)
    assert "3 more different pipelines are not shown" in " ".join(said.split())
    assert f"pipeline {LANES_MAX - 1}:" in said
    assert f"pipeline {LANES_MAX}:" not in said


def test_an_estimator_without_a_schedule_shows_the_rest(judge, tmp_path):
    estimate = replace(judge.estimate(PLAN), estimator="formula", stages=())
    said, _ = drawn(Formula(estimate), tmp_path, estimate=estimate)
    assert "No schedule is drawn: the formula estimator is a formula without one." in said
    assert "stage 1: layers 3-5" in said
    assert "V100-16@us-central1-a compute" in said
    assert "idle" not in said


@pytest.mark.slow
def test_too_many_passes_still_show_the_rest(judge, tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "PASSES_MAX", 10)
    said, _ = drawn(judge, tmp_path)
    assert "No schedule is drawn: its 2 different pipelines have 28" in " ".join(said.split())


# Time ---------------------------------------------------------------------------------------------


def lane(micro_batches, *, each_s=1.0):
    bars = [Bar("forward", 0.0, each_s, (0, 1), 0)]
    for m in range(2 * micro_batches - 1):
        kind = "backward" if m % 2 == 0 else "forward"
        bars.append(Bar(kind, (m + 1) * each_s, (m + 2) * each_s, (0, 1), m))
    bars.append(Bar("optimizer", bars[-1].end_s, bars[-1].end_s + 1.0))
    return Lane((0,), (Row(0, 0, "stage 0", "", "", tuple(bars), ()),))


def test_few_passes_are_drawn_in_one_piece():
    assert windows_of([lane(30)], 61.0) == [(0.0, 61.0)]


def test_start_and_end_of_many_passes_are_drawn():
    start, end = windows_of([lane(500)], 1001.0)
    assert start == (0.0, 12.0)
    assert end == (1001.0 - 13.0, 1001.0)


def test_a_slow_pipeline_is_drawn_completely():
    assert windows_of([lane(500), lane(3, each_s=160.0)], 1001.0) == [(0.0, 1001.0)]


def test_passes_thinner_than_a_pixel_are_visible():
    figure = Figure(figsize=(2, 1), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_ylim(1, 0)
    bars = tuple(Bar("forward", 0.1 + m, 0.4 + m, (0, 1), m) for m in range(200))
    row = Row(0, 0, "stage 0", "", "", bars, ())
    draw_schedule(axes, [PanelRow(0.0, Lane((0,), (row,)), row)], (0.0, 200.0))
    canvas.draw()
    # 200 passes on 200 dots, each less than half a dot wide: no dot of the row stays white.
    dots = np.asarray(canvas.buffer_rgba())[40, :, 0]
    assert dots.max() < 255


# Money --------------------------------------------------------------------------------------------


def test_costs_are_sorted_and_small_ones_are_merged():
    pools = tuple((f"gpu@zone-{number}", float(number)) for number in range(10))
    money = Money(45.0, 0.5, pools, (("a -> b", 0.5),))
    parts = slices_of(money)
    assert parts[0] == ("gpu@zone-9 compute", 9.0)
    assert len(parts) == SLICES_MAX
    assert parts[-1] == ("4 others", 3.0 + 2.0 + 1.0 + 0.5)
    assert sum(usd for _, usd in parts) == pytest.approx(45.5)


@pytest.mark.parametrize(
    ("money", "sentence"),
    [
        (Money(None, 0.1, (), (), ("T4@here",)), "Unknown: there is no price for T4@here."),
        (Money(0.0, 0.0, (("cpu@local", 0.0),)), "Nothing: all prices here are zero."),
    ],
)
def test_without_prices_a_sentence_replaces_the_pie(money, sentence, judge, tmp_path):
    assert money_sentence(money) == sentence
    said, _ = drawn(judge, tmp_path, estimate=replace(judge.estimate(PLAN), money=money))
    assert sentence in said
    assert "compute" not in said


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.json"])
def test_other_kinds_of_files_are_refused(name, judge, tmp_path):
    with pytest.raises(InputError, match=r"cannot be.*use \.svg or \.png"):
        write_plot(PLAN, judge.estimate(PLAN), judge, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/plan.svg", "missing/plan.png"])
def test_an_unwritable_path_is_an_error(name, judge, tmp_path):
    with pytest.raises(InputError, match=r"cannot be written: No such file"):
        write_plot(PLAN, judge.estimate(PLAN), judge, tmp_path / name)


def test_without_matplotlib_the_error_says_how_to_install_it(judge, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"the group plot: make install"):
        write_plot(PLAN, judge.estimate(PLAN), judge, tmp_path / "plan.svg")


def test_the_commands_load_no_matplotlib_before_it_is_needed():
    code = "import sys, sailord.cli.planning.plan; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
