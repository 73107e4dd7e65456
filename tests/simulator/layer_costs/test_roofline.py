"""The roofline: its formula, its calibration and its errors."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.roofline import (
    SPLIT_KERNELS,
    Calibration,
    Demand,
    HalfPrecision,
    Roofline,
    calibrations,
    half_precision,
    peak_flops,
)
from simulator.models.families import build_model
from simulator.models.layers import Precision
from simulator.models.presets import preset
from simulator.network.curves import curve_from_bandwidths
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.job import Job, Optimizer

ROOT = Path(__file__).resolve().parents[3]
CATALOGUE = load_catalogue()
MODEL = build_model("opt", layers=4, hidden=2048, heads=16)


def roofline(precision: Precision = "fp32", measured: MeasuredNetwork | None = None) -> Roofline:
    network = Network(catalogue=CATALOGUE, measured=measured or MeasuredNetwork())
    return Roofline(MODEL, 2048, precision, False, CATALOGUE, network)


def demand(
    compute: float, traffic: float, collective: float = 0.0, *, backward: float = 2.0
) -> Demand:
    values = (compute, traffic, collective, 2 * collective, 1.0, backward)
    return Demand(*(np.array([value]) for value in values))


def test_forward_and_backward_are_three_forwards_and_their_own_collectives() -> None:
    calibration = Calibration(0.5, 0.25, 3.0, 2.0, 0.0, 0.0, "")
    forward, backward = calibration.seconds(demand(1.0, 1.0, 0.1))
    assert forward[0] == pytest.approx(1 / 0.5 + 1 / 0.25 + 3 * 0.1)
    assert backward[0] == pytest.approx(2 * (1 / 0.5 + 1 / 0.25) + 3 * 0.2)


def test_frozen_weights_have_no_products_in_backward() -> None:
    calibration = Calibration(0.5, 0.25, 3.0, 2.0, 0.0, 0.0, "")
    forward, backward = calibration.seconds(demand(1.0, 1.0, backward=1.0))
    assert forward[0] == pytest.approx(1 / 0.5 + 1 / 0.25)
    assert backward[0] == pytest.approx(1 / 0.5 + 2 / 0.25)


def test_the_ratio_moves_time_between_the_directions_and_keeps_the_sum() -> None:
    one = Calibration(1.0, 1.0, 1.0, 2.0, 0.0, 0.0, "").seconds(demand(1.0, 1.0))
    other = Calibration(1.0, 1.0, 1.0, 3.0, 0.0, 0.0, "").seconds(demand(1.0, 1.0))
    assert other[0][0] == pytest.approx(6.0 / 4)
    assert one[0] + one[1] == pytest.approx(other[0] + other[1])


def test_no_pass_is_faster_than_its_kernel_launches() -> None:
    calibration = Calibration(1.0, 1.0, 1.0, 2.0, 5.0, 0.0, "")
    assert [float(row[0]) for row in calibration.seconds(demand(2.0, 0.0))] == [5.0, 5.0]
    assert [float(row[0]) for row in calibration.seconds(demand(3.0, 0.0))] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("gpu", "precision", "rate"),
    [
        ("A100-40", "fp32", "tf32"),
        ("A100-40", "bf16", "bf16"),
        ("V100-16", "fp32", "fp32"),
        ("V100-16", "bf16", "fp32"),
        ("V100-16", "fp16", "fp16"),
    ],
)
def test_peak_flops_of_a_precision(gpu: str, precision: str, rate: str) -> None:
    facts = CATALOGUE.gpu(gpu)
    assert peak_flops(facts, precision) == facts.peak_flops[rate]


def test_a_rate_that_the_catalogue_lacks_is_asked_for_where_a_job_needs_it() -> None:
    facts = replace(CATALOGUE.gpu("A100-40"), name="half", peak_flops={"fp16": 1e14})
    assert peak_flops(facts, "fp16") == 1e14
    with pytest.raises(InputError, match=r"\[gpu.half\] tflops: has no rate for jobs in fp32; add"):
        peak_flops(facts, "fp32")


def test_time_grows_with_the_micro_batch_and_falls_with_tp() -> None:
    roof = roofline()
    one, two = (roof.demand("A100-40", tp=1, micro_batch=b) for b in (1, 2))
    split = roof.demand("A100-40", tp=2, micro_batch=1)
    block = slice(1, -1)
    # Larger products leave fewer multiprocessors idle in their last wave.
    assert (one.compute_s[block] < two.compute_s[block]).all()
    assert (two.compute_s[block] < 2 * one.compute_s[block]).all()
    assert (two.traffic_s[block] > one.traffic_s[block]).all()
    assert (one.compute_s[block] / 2 < split.compute_s[block]).all()
    assert (split.compute_s[block] < one.compute_s[block]).all()
    assert (split.kernels == SPLIT_KERNELS * one.kernels).all()
    assert not one.collectives_forward_s.any()
    assert (split.collectives_forward_s[block] > 0).all()


def test_ring_crosses_the_middle_of_a_machine_once_per_direction() -> None:
    sizes = (1e3, 1e9)
    curve = {
        gpus: curve_from_bandwidths(gpus // 2, sizes_bytes=sizes, bytes_per_s=(1e10, 1e10))
        for gpus in (2, 4)
    }
    roof = roofline(measured=MeasuredNetwork(within={"V100-16": curve}))
    one = 4 * MODEL.layers[1].allreduce_elements(micro_batch=1, sequence=2048) / 1e10
    for tp in (2, 4):
        found = roof.demand("V100-16", tp=tp, micro_batch=1).collectives_forward_s[1]
        assert found == pytest.approx(2 * 2 * (tp - 1) / tp * one, rel=1e-3)


def test_the_last_wave_of_tiles_is_half_full_on_average() -> None:
    roof = roofline()
    facts = CATALOGUE.gpu("A100-40")
    assert facts.multiprocessors == 108
    layer = MODEL.layers[1]
    shapes = [t.shape for t in layer.tensors if len(t.shape) == 2]
    work = sum(rows * columns for rows, columns in shapes)
    # 2,048 tokens are 16 tiles; a product has that times the tiles of its rows.
    waves = [16 * rows / 128 / 108 for rows, _ in shapes]
    longer = sum(r * c * (n + 0.5) / n for (r, c), n in zip(shapes, waves, strict=True)) / work
    flops = layer.forward_flops(micro_batch=1, sequence=2048)
    found = roof.demand("A100-40", tp=1, micro_batch=1).compute_s[1]
    assert found == pytest.approx(longer * flops / peak_flops(facts, "fp32"))


def test_16_bit_has_shares_of_its_own() -> None:
    fp32 = roofline().times("A100-40", tp=1, micro_batch=8)
    bf16 = roofline("bf16").times("A100-40", tp=1, micro_batch=8)
    assert bf16.provenance.relative_error == half_precision()["A100-40"].relative_error
    assert half_precision()["A100-40"].source in bf16.provenance.notes[0]
    assert (bf16.forward[1:] < fp32.forward[1:]).all()
    calibration = Calibration(0.5, 0.25, 3.0, 2.5, 0.1, 0.0, "")
    half = calibration.in_16_bit(HalfPrecision(0.8, 0.1, "x"))
    assert (half.compute_share, half.traffic_share, half.launch_s) == (0.8, 0.25, 0.1)
    assert half.backward_ratio == 2.0
    assert calibration.in_16_bit(HalfPrecision(0.8, 0.1, "x", 0.6)).traffic_share == 0.6


def test_a_gpu_without_bf16_is_as_fast_as_in_fp32() -> None:
    """Its products, its traffic, its all-reduces and its optimizer are those of fp32."""
    fp32, bf16 = (roofline(each).times("V100-16", tp=2, micro_batch=8) for each in ("fp32", "bf16"))
    assert (bf16.forward == fp32.forward).all()
    assert (bf16.backward == fp32.backward).all()
    assert bf16.optimizer_s_per_parameter == fp32.optimizer_s_per_parameter
    assert "V100-16 has no bf16 in hardware; it is computed as fp32" in bf16.provenance.notes


def test_every_calibration_is_plausible_and_has_a_source() -> None:
    known = calibrations()
    assert {"default", "cpu"} <= set(known)
    assert set(known) - {"default"} <= set(CATALOGUE.gpus)
    for name, entry in known.items():
        assert 0 < entry.compute_share <= 1, name
        assert 0 < entry.traffic_share <= 1.2, name
        assert 1.9 < entry.backward_ratio < 3.2, name
        assert entry.fitted_on, name


def test_every_16_bit_share_is_plausible_and_has_a_source() -> None:
    known = half_precision()
    assert {"default", "cpu"} <= set(known)
    assert set(known) - {"default"} <= set(CATALOGUE.gpus)
    for name, entry in known.items():
        assert 0.3 <= entry.compute_share < 1, name
        assert 0.05 <= entry.relative_error <= 0.5, name
        assert entry.source, name


def test_borrowed_calibration_has_a_larger_error() -> None:
    known = calibrations()
    borrowed = {
        name: entry for name, entry in known.items() if entry.fitted_on.startswith("nothing: as ")
    }
    assert {"H100-80", "H200-141", "L4", "T4", "RTX-4090"} <= set(borrowed)
    for name, entry in borrowed.items():
        lender = entry.fitted_on.removeprefix("nothing: as ").split(",")[0]
        assert entry.relative_error > known[lender].relative_error, name


def test_calibration_is_the_output_of_its_program(reference: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.calibrate", "--profiles", str(reference)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    tables = tomllib.loads(printed[printed.index("# How much") :])
    assert tables["half"] == {
        name: {key: value for key, value in asdict(entry).items() if value is not None}
        for name, entry in half_precision().items()
    }
    found = tables["gpu"]
    assert set(found) == set(calibrations())
    for name, entry in calibrations().items():
        for key, value in found[name].items():
            if key == "fitted_on":
                assert value == entry.fitted_on
            else:
                assert getattr(entry, key) == pytest.approx(value, rel=0.02), (name, key)


def test_a_step_of_sgd_moves_one_moment_less_than_one_of_adam() -> None:
    def seconds(optimizer: Optimizer, precision: Precision) -> float:
        job = Job("job", MODEL, 8, 2048, precision=precision, optimizer=optimizer)
        costs = LayerCosts(
            job, profile=None, catalogue=CATALOGUE, network=Network(catalogue=CATALOGUE)
        )
        return costs.times("A100-40", tp=1, samples=1).optimizer_s_per_parameter

    assert seconds("sgd", "fp32") == pytest.approx(32 / 40 * seconds("adam", "fp32"))
    assert seconds("sgd", "bf16") == pytest.approx(38 / 46 * seconds("adamw", "bf16"))


def test_an_image_has_the_tokens_of_its_model_whatever_the_job_says() -> None:
    def costs(sequence: int) -> LayerCosts:
        job = Job("job", preset("vit-b"), 64, sequence)
        network = Network(catalogue=CATALOGUE)
        return LayerCosts(job, profile=None, catalogue=CATALOGUE, network=network)

    stated, other = costs(197), costs(1)
    assert other.output_bytes(3) == stated.output_bytes(3) == 2 * 197 * 768
    forward = [one.times("A100-40", tp=1, samples=64).forward for one in (stated, other)]
    kept = [one.kept_bytes(tp=1, samples=64, recompute="none") for one in (stated, other)]
    for one, same in (forward, kept):
        assert (one == same).all()
