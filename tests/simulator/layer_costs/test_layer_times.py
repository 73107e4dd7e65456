"""Layer times: exact where measured, otherwise estimated with a note, and never zero."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.layer_times import LAUNCH_BOUND, LayerTimeTable
from simulator.layer_costs.profile import Profile, Timing, TimingMeasurement
from simulator.layer_costs.published_profile import profile_from_json
from simulator.layer_costs.roofline import LayerTimes, Roofline
from simulator.models.families import build_model
from simulator.models.layers import Precision
from simulator.network.network import Network
from simulator.spec.job import Job
from simulator.spec.provenance import Provenance, weakest
from tests.simulator.worlds import GPUS, small_model

LAYERS = len(small_model().layers)


def profile(timings: dict[tuple[str, int, int], float | list[float]], **changes: Any) -> Profile:
    """Forward seconds of every layer by (GPU, TP, micro batch); backward takes twice as long."""
    rows = {key: np.array(np.broadcast_to(each, LAYERS), float) for key, each in timings.items()}
    fixed: dict[str, Any] = {
        "name": "given",
        "sequence": 128,
        "precision": "fp32",
        "layer_names": tuple(layer.name for layer in small_model().layers),
        "timings": {key: Timing(row, 2 * row, 1.0) for key, row in rows.items()},
        "sizes": {},
        "optimizer_parameters": {1: 1000, 2: 500, 4: 250},
        "config": {},
    }
    return Profile(**{**fixed, **changes})


def table(given: Profile | None, *, hook_s: float = 0.0, **changes: Any) -> LayerTimeTable:
    catalogue = load_catalogue()
    fixed: dict[str, Any] = {
        "model": small_model(),
        "sequence": 128,
        "precision": "fp32",
        "flash": True,
        "catalogue": catalogue,
        "network": Network(catalogue),
    }
    roofline = Roofline(**{**fixed, **changes})
    return LayerTimeTable(given, roofline, catalogue, lambda _: hook_s)


def forward(times: LayerTimes) -> list[float]:
    return [float(seconds) for seconds in times.forward]


# Measured ------------------------------------------------------------------------------------


def test_measured_times_are_returned_unchanged() -> None:
    given = profile({("V100-16", 1, 2): [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], ("V100-16", 1, 4): 1.0})
    times = table(given).times("V100-16", tp=1, micro_batch=2)
    assert forward(times) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert times.backward.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    assert times.optimizer_s_per_parameter == 1.0 / 1000
    assert times.provenance.source == "measured"


def test_times_are_linear_between_measured_micro_batches() -> None:
    given = profile({("T4", 1, 2): 0.2, ("T4", 1, 4): 0.3, ("T4", 1, 8): 0.9})
    seconds = {batch: table(given).times("T4", tp=1, micro_batch=batch) for batch in (3, 5, 6, 7)}
    assert forward(seconds[3]) == pytest.approx([0.25] * LAYERS)
    assert forward(seconds[6]) == pytest.approx([0.6] * LAYERS)
    for times in seconds.values():
        assert times.provenance.source == "interpolated"
        assert times.provenance.relative_error >= 0.05
        assert "2, 4, 8" in times.provenance.notes[0]


def test_extrapolated_times_have_a_larger_error() -> None:
    given = profile({("T4", 1, 2): 0.2, ("T4", 1, 4): 0.3})
    between, above, below = (
        table(given).times("T4", tp=1, micro_batch=batch) for batch in (3, 8, 1)
    )
    assert forward(above) == pytest.approx([0.5] * LAYERS)
    # A smaller batch takes at least its share and at most the whole.
    assert all(0.1 <= seconds <= 0.2 for seconds in forward(below))
    for times in (above, below):
        assert times.provenance.source == "interpolated"
        assert times.provenance.relative_error > between.provenance.relative_error


def test_batches_bound_by_launches_say_nothing_of_large_ones() -> None:
    def computed(tp: int, batch: int) -> list[float]:
        return forward(table(None).times("T4", tp=tp, micro_batch=batch))

    alone = {("T4", 1, batch): [2 * each for each in computed(1, batch)] for batch in (64, 128)}
    launching = 10 * max(computed(4, 2))
    given = profile({**alone, ("T4", 4, 1): launching, ("T4", 4, 2): launching})
    found = table(given).times("T4", tp=4, micro_batch=100_000)
    assert all(
        seconds >= 0.8 * 2 * least
        for seconds, least in zip(forward(found), computed(4, 100_000), strict=True)
    )
    assert (found.backward > 2 * launching).all()
    assert found.provenance.relative_error == 0.25
    assert "bound by launches" in found.provenance.notes[0]
    other = table(given).times("T4", tp=2, micro_batch=100_000)
    assert other.provenance.relative_error == 0.25, "scaled from what is itself scaled"


def test_one_measurement_scales_with_the_batch() -> None:
    given = profile({("T4", 1, 4): 0.4})
    seconds = [forward(table(given).times("T4", tp=1, micro_batch=b))[0] for b in (1, 2, 4, 8)]
    assert seconds == pytest.approx([0.25, 0.3, 0.4, 0.8])


def test_a_larger_batch_is_never_faster_where_measurements_grow(examples: int) -> None:
    rng = random.Random("batches")
    for _ in range(examples):
        sizes = sorted(rng.sample([1, 2, 3, 4, 8, 16], rng.randint(1, 4)))
        rows = np.sort(np.array([[rng.uniform(0.1, 2)] * LAYERS for _ in sizes]), axis=0)
        given = profile({("T4", 1, b): list(row) for b, row in zip(sizes, rows, strict=True)})
        hook_s = rng.choice([0.0, rng.uniform(0, 0.5)])
        found = table(given, hook_s=hook_s)
        seconds = [forward(found.times("T4", tp=1, micro_batch=b))[0] for b in range(1, 40)]
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
        assert seconds[0] > 0


# Hooks ---------------------------------------------------------------------------------------


def test_hook_time_is_subtracted_from_launch_bound_layers() -> None:
    """One and two samples take as long as launching; from four on, time grows with the batch."""
    measured = {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.4}
    given = profile({("T4", 1, b): value for b, value in measured.items()})
    found = table(given, hook_s=0.5)
    seconds = {b: forward(found.times("T4", tp=1, micro_batch=b))[0] for b in measured}
    # The GPU does a sample in 0.3 s at best, so two of them take no less than 0.6 s.
    assert seconds == pytest.approx({1: 0.5, 2: 0.6, 4: 1.4, 8: 2.4})


def test_hook_correction_never_raises_times(examples: int) -> None:
    rng = random.Random("hooks")
    corrected = 0
    for _ in range(examples):
        sizes = sorted(rng.sample([1, 2, 4, 8], rng.randint(1, 4)))
        first = rng.uniform(0.5, 1.5)
        values = sorted(first * rng.uniform(1, 2.5 if rng.random() < 0.5 else 1.3) for _ in sizes)
        given = profile({("T4", 1, b): value for b, value in zip(sizes, values, strict=True)})
        found = table(given, hook_s=rng.uniform(0, 2))
        seconds = [forward(found.times("T4", tp=1, micro_batch=b))[0] for b in sizes]
        for index, (mine, measured) in enumerate(zip(seconds, values, strict=True)):
            assert 0 < mine <= measured
            # Launches set the pace only if a larger batch takes hardly longer.
            larger = index + 1
            if larger == len(values) or values[larger] > measured * LAUNCH_BOUND ** math.log2(
                sizes[larger] / sizes[index]
            ):
                assert mine == measured
            corrected += mine < measured
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
        # No batch is faster than the best rate per sample that was measured.
        best = min(value / b for b, value in zip(sizes, values, strict=True))
        for mine, b in zip(seconds, sizes, strict=True):
            assert mine >= best * b * (1 - 1e-12)
    assert corrected >= examples // 2


def test_hook_time_comes_from_the_platform() -> None:
    """The correction applies to jobs on a platform with a hook time."""
    given = profile({(gpu, 1, 1): 1e-3 for gpu in ("GH-96", "T4")} | {("GH-96", 1, 2): 1.1e-3})
    job = Job("fixed", small_model(), 8, 128, precision="fp32")
    catalogue = load_catalogue()
    costs = LayerCosts(job, profile=given, catalogue=catalogue, network=Network(catalogue))
    hook_s = platform_of("GH-96").profiled_hook_s
    assert hook_s > 0
    assert costs.times("GH-96", tp=1, samples=1).forward[0] == pytest.approx(1e-3 - hook_s)
    assert costs.times("T4", tp=1, samples=1).forward[0] == 1e-3


# Not measured --------------------------------------------------------------------------------


def test_unmeasured_tp_degree_is_scaled_and_noted() -> None:
    given = profile({("V100-16", 1, 1): 0.1})
    found = table(given)
    times = found.times("V100-16", tp=4, micro_batch=1)
    one, four = (found.roofline.times("V100-16", tp=tp, micro_batch=1) for tp in (1, 4))
    assert forward(times) == pytest.approx(list(0.1 * four.forward / one.forward))
    assert times.provenance.source == "interpolated"
    assert times.provenance.relative_error >= 0.15
    assert "TP 4: not measured, scaled from TP 1" in times.provenance.notes[0]


def test_unmeasured_tp_degree_uses_both_neighbours() -> None:
    given = profile({("V100-16", 1, 1): 0.4, ("V100-16", 4, 1): 0.1})
    found = table(given)
    model = {tp: found.roofline.times("V100-16", tp=tp, micro_batch=1) for tp in (1, 2, 4)}
    by_one = 0.4 * model[2].forward / model[1].forward
    by_four = 0.1 * model[2].forward / model[4].forward
    times = found.times("V100-16", tp=2, micro_batch=1)
    assert forward(times) == pytest.approx(list((by_one + by_four) / 2))
    assert "from TP 1 and 4" in times.provenance.notes[0]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("sequence", "precision"), [(16, "bf16"), (2048, "fp32")])
def test_a_profile_that_agrees_with_the_roofline_does_so_under_other_conditions(
    tp: int, sequence: int, precision: Precision
) -> None:
    """Also at TP degrees that were not measured."""
    model = build_model("gpt2", layers=4, hidden=1024, heads=8, sequence=2048)
    there = table(None, model=model, sequence=sequence, precision=precision)
    computed = there.times("H100-80", tp=1, micro_batch=1)
    timings = {("H100-80", 1, 1): Timing(computed.forward, computed.backward, None)}
    given = replace(profile({}, sequence=sequence, precision=precision), timings=timings)
    job: dict[str, Any] = {"model": model, "sequence": 2048, "precision": "bf16"}
    found, wanted = (
        table(one, **job).times("H100-80", tp=tp, micro_batch=1) for one in (given, None)
    )
    assert found.forward == pytest.approx(wanted.forward)
    assert found.backward == pytest.approx(wanted.backward)
    assert found.optimizer_s_per_parameter == pytest.approx(wanted.optimizer_s_per_parameter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence": 64}, "sequence 64, profiled at 128"),
        ({"precision": "bf16"}, "precision bf16, profiled in fp32"),
    ],
)
def test_other_sequence_or_precision_is_scaled_and_noted(
    changes: dict[str, Any], words: str
) -> None:
    given = profile({("V100-16", 1, 1): 0.1})
    found = table(given, **changes)
    times = found.times("V100-16", tp=1, micro_batch=1)
    here = found.roofline.times("V100-16", tp=1, micro_batch=1)
    there = table(given).roofline.times("V100-16", tp=1, micro_batch=1)
    assert forward(times) == pytest.approx(list(0.1 * here.forward / there.forward))
    assert times.provenance.source == "interpolated"
    assert any(words in note for note in times.provenance.notes)
    assert times.provenance.relative_error == 0.25


def test_scaling_makes_no_measurement_surer() -> None:
    """Where the host sets the pace, the spread of a measurement is up to 40 %."""
    how = TimingMeasurement("V100", "", "", "", 9, spread=0.4)
    timing = Timing(np.full(LAYERS, 0.1), np.full(LAYERS, 0.2), 1.0, measurement=how)
    given = replace(profile({}), timings={("V100-16", 1, 1): timing, ("V100-16", 1, 2): timing})
    for sequence, batch in ((128, 1), (64, 1), (128, 64)):
        times = table(given, sequence=sequence).times("V100-16", tp=1, micro_batch=batch)
        assert times.provenance.relative_error == 0.4, (sequence, batch)


def test_unprofiled_gpu_kind_is_computed_and_noted() -> None:
    times = table(profile({("V100-16", 1, 1): 0.1})).times("T4", tp=1, micro_batch=1)
    assert times.provenance.source == "analytic"
    assert times.provenance.relative_error > 0
    assert "T4: computed, not measured" in times.provenance.notes[0]


@pytest.mark.parametrize("given", [None, profile({("V100-16", 1, 1): 0.1})])
def test_unknown_gpu_kind_gets_a_suggestion(given: Profile | None) -> None:
    with pytest.raises(InputError) as caught:
        table(given).times("A100-400", tp=1, micro_batch=1)
    (problem,) = caught.value.problems
    assert '"A100-400"' in problem.what
    assert '"A100-40"' in problem.cure


def test_every_layer_takes_time() -> None:
    """For any GPU, TP and batch, every layer's passes and the optimizer step take time."""
    for given in (None, profile({("T4", 2, 2): 1e-3, ("GH-96", 1, 1): 1e-3})):
        found = table(given, hook_s=5e-3)
        for gpu in (*GPUS, "cpu", "L4", "RTX-4090"):
            for tp in (1, 2, 4):
                for batch in (1, 2, 3, 16):
                    times = found.times(gpu, tp=tp, micro_batch=batch)
                    assert (times.forward > 0).all()
                    assert (times.backward > 0).all()
                    assert times.optimizer_s_per_parameter > 0
                    assert np.isfinite(times.forward).all()


# The optimizer -------------------------------------------------------------------------------


def test_optimizer_step_is_per_timed_parameter() -> None:
    given = profile({("T4", 1, 1): 0.1, ("T4", 4, 1): 0.1})
    assert table(given).times("T4", tp=1, micro_batch=1).optimizer_s_per_parameter == 1 / 1000
    assert table(given).times("T4", tp=4, micro_batch=1).optimizer_s_per_parameter == 1 / 250


def test_unmeasured_optimizer_step_is_computed_and_noted() -> None:
    """Step seconds without their parameter count do not count as measured."""
    fresh = table(None).times("T4", tp=1, micro_batch=1).optimizer_s_per_parameter
    timings = {("T4", 1, 1): Timing(np.full(LAYERS, 0.1), np.full(LAYERS, 0.2), None)}
    for given in (
        replace(profile({}), timings=timings),
        profile({("T4", 1, 1): 0.1}, optimizer_parameters={}),
    ):
        times = table(given).times("T4", tp=1, micro_batch=1)
        assert times.optimizer_s_per_parameter == fresh
        assert any("optimizer" in note for note in times.provenance.notes)


# Stages --------------------------------------------------------------------------------------


def test_a_stage_is_the_sum_of_its_layers() -> None:
    """Backward includes the recomputed forward, of blocks alone."""
    given = profile({("T4", 1, 1): [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]})
    job = Job("fixed", small_model(), 8, 128, precision="fp32")
    catalogue = load_catalogue()
    costs = LayerCosts(job, profile=given, catalogue=catalogue, network=Network(catalogue))
    again = {(0, 6): 30.0, (0, 1): 0.0, (1, 3): 6.0, (4, 6): 16.0, (5, 6): 0.0}
    for (first, end), seconds in again.items():
        forward_s = sum(2.0**i for i in range(first, end))
        for recompute, more in (("none", 0.0), ("full", seconds)):
            asked: dict[str, Any] = {"tp": 1, "samples": 1, "recompute": recompute}
            found = costs.stage_seconds("T4", layers=(first, end), **asked)
            assert found == (forward_s, 2 * forward_s + more)
            assert costs.backward_by_layer("T4", **asked)[first:end].sum() == found[1]


def test_a_job_with_dropout_keeps_and_moves_scores_with_flash_attention_too() -> None:
    model = build_model("gpt2", layers=2, hidden=64, heads=8, vocab=64, sequence=512, dropout=True)
    job = Job("job", model, global_batch=8, sequence=512, dropout=0.1)

    def costs(job: Job) -> LayerCosts:
        catalogue = load_catalogue()
        return LayerCosts(
            job, profile=None, catalogue=catalogue, network=Network(catalogue=catalogue)
        )

    flash, eager = costs(job), costs(replace(job, flash_attention=False))
    use: dict[str, Any] = {"tp": 1, "samples": 8, "recompute": "none"}
    scores = 8 * 8 * 512 * 512
    assert flash.kept_bytes(**use)[1] > 5 * scores  # Twice in 16 bits, and the mask.
    assert (flash.kept_bytes(**use) == eager.kept_bytes(**use)).all()
    assert (flash.workspace_bytes(**use) == eager.workspace_bytes(**use)).all()
    here, there = (one.times("A100-40", tp=1, samples=8) for one in (flash, eager))
    assert (here.forward == there.forward).all()


# The wrong profile ---------------------------------------------------------------------------


def test_a_profile_of_another_model_is_an_error() -> None:
    job = Job("fixed", small_model(layers=7), 8, 128)
    catalogue = load_catalogue()
    with pytest.raises(InputError, match=r"has 6 layers, but the model gpt2 has 9"):
        LayerCosts(
            job,
            profile=profile({("T4", 1, 1): 0.1}),
            catalogue=catalogue,
            network=Network(catalogue),
        )


def published(**entry: object) -> dict[str, Any]:
    """Return a profile in the published format with one measurement, parts of it replaced."""
    good = {"fwd_s": [0.1, 0.2, 0.3], "bwd_s": [0.2, 0.4, 0.6], "optimizer_step_s": 0.01}
    sizes = {key: [1, 2, 3] for key in ("params_floats", "act_output_floats", "act_mem_floats")}
    return {
        "model": "tiny",
        "config": {"seq_len": 16, "transformer_layers": 1},
        "layers": ["embedding", "block", "head"],
        "timing": {"T4": {"tp1": {"mbs2": {**good, **entry}, "mbs4": good}}},
        "memory_per_layer": {"tp1": sizes},
        "optimizer_profile_model_params": {"tp1": 6},
    }


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({"fwd_s": [0.1, None, 0.3]}, "timing.T4.tp1.mbs2.fwd_s[1]"),
        ({"fwd_s": [0.1, float("nan"), 0.3]}, "timing.T4.tp1.mbs2.fwd_s[1]"),
        ({"bwd_s": [0.1, 0.2, -0.3]}, "timing.T4.tp1.mbs2.bwd_s[2]"),
        ({"bwd_s": [0.1, 0.2, float("inf")]}, "timing.T4.tp1.mbs2.bwd_s[2]"),
        ({"bwd_s": [0.1, 0.2]}, "timing.T4.tp1.mbs2.bwd_s"),
        ({"bwd_s": None}, "timing.T4.tp1.mbs2.bwd_s"),
        ({"optimizer_step_s": -1}, "timing.T4.tp1.mbs2.optimizer_step_s"),
    ],
)
def test_invalid_measurement_is_reported_with_its_place(
    entry: dict[str, object], place: str
) -> None:
    with pytest.raises(InputError) as caught:
        profile_from_json(published(**entry), place="file", catalogue=load_catalogue())
    assert any(place in problem.place for problem in caught.value.problems)


def test_a_run_that_ran_out_of_memory_is_not_a_measurement() -> None:
    """Published files have null there; the value is interpolated with a note."""
    raw = published(fwd_s=None, bwd_s=None, optimizer_step_s=None)
    found = profile_from_json(raw, place="file", catalogue=load_catalogue())
    assert found.micro_batches("T4", 1) == [4]


def test_flags_of_a_measurement_become_notes() -> None:
    doubted = Timing(np.full(LAYERS, 0.1), np.full(LAYERS, 0.2), 1.0, ("T4 tp1 mbs1: noisy",))
    given = replace(profile({}), timings={("T4", 1, 1): doubted, ("T4", 1, 4): doubted})
    for tp, batch in ((1, 1), (1, 2), (2, 1)):
        for sequence in (128, 64):
            times = table(given, sequence=sequence).times("T4", tp=tp, micro_batch=batch)
            assert "T4 tp1 mbs1: noisy" in times.provenance.notes, (tp, batch, sequence)


def test_provenance_is_the_weakest_source_with_the_widest_bar() -> None:
    parts = [
        Provenance("measured", 0.02, ("a",)),
        Provenance("analytic", 0.1, ("b",)),
        Provenance("interpolated", 0.3, ("c", "a")),
    ]
    assert weakest(parts) == Provenance("analytic", 0.3, ("a", "b", "c"))
    assert weakest([*parts, replace(parts[1], relative_error=0.4)]).relative_error == 0.4
