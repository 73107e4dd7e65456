"""Fit the roofline's shares per GPU kind on measured profiles, and print the remaining errors.

    python -m benchmarks.calibrate --profiles DIR

prints a table and then the TOML that ``simulator/data/calibration.toml`` holds. Errors are of
forward plus backward of a transformer block. ``seen`` is what the fit leaves; ``unseen`` is what
it says about a model (or, of kinds that timed one model only, a TP degree) left out of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sailord.text.table import table
from simulator.api import Measurements, load_measurements
from simulator.arrays import Floats
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_times import LayerTimeTable
from simulator.layer_costs.roofline import (
    Calibration,
    Demand,
    HalfPrecision,
    Roofline,
    peak_flops,
)
from simulator.network.network import Network
from simulator.published_cases import profiled_model

# What the published artefact profiled, and the family whose blocks each has.
FAMILIES = {"OPT-350": "opt", "GPT-Neo-2.7": "gpt-neo", "OPT-30": "opt", "LLAMA-3-8": "llama"}
SOURCE = "SOSP'25 Sailor artefact profiles"
# A timed block that is not the first one, which also carries what the embedding left behind.
BLOCK = 2
FITTED = ("compute_share", "traffic_share", "collective_factor", "backward_ratio", "launch_s")
# Where the measurements do not determine a constant, the fit stays near the middle of what other
# kinds gave: a constant two doublings away costs as much as 3 % of error.
MIDDLE = Calibration(0.65, 0.75, 0.8, 2.5, 1e-3, 0.0, "")
PULL = 0.03 / np.log(4) ** 2
CEILINGS = {"compute_share": 1.0, "traffic_share": 1.2}
# Measurements say less about how the time divides into forward and backward than about their sum,
# and the sum is what matters to a pipeline.
FORWARD_WEIGHT = 0.2

# Unmeasured kinds: the nearest measured one, the error bar, and the reason.
BORROWED = {
    "H100-80": ("GH-96", 0.25, "the same chip with slower memory"),
    "H200-141": ("GH-96", 0.25, "the same chip with faster memory"),
    "L4": ("RTX-3090", 0.55, "a later chip of the same line"),
    "RTX-4090": ("RTX-3090", 0.55, "a later chip of the same line"),
    "T4": ("Titan-RTX", 0.35, "the same generation, held back by its power limit"),
}

# There are no published profiles in 16-bit precision. What large matrix products reach is known
# from benchmarks of cuBLAS; of kinds with public training runs, it is compared with these
# (benchmarks/other_systems.py).
HALF = {
    "A100-40": HalfPrecision(0.85, 0.1, "as A100-80"),
    "A100-80": HalfPrecision(
        0.85,
        0.1,
        "cuBLAS reaches about 265 of 312 TFLOPS with large "
        "products; agrees with 14 runs of GPT 18.4 B (VIA-Research/vTrain)",
    ),
    "GH-96": HalfPrecision(0.75, 0.15, "as H100-80", traffic_share=0.73),
    "H100-80": HalfPrecision(
        0.75,
        0.1,
        "17 blocks and heads of 11 models, measured on one H100 (docs/gpu.md); "
        "the error is the mean on a family left out",
        traffic_share=0.73,
    ),
    "H200-141": HalfPrecision(
        0.75,
        0.1,
        "as H100-80; blocks of two LLaMA on one H200 are within 9 %",
        traffic_share=0.73,
    ),
    "L4": HalfPrecision(0.5, 0.3, "as T4: its limit of 72 W is reached as well"),
    "T4": HalfPrecision(
        0.5,
        0.1,
        "47 runs of GPT-2 on 16 T4 (DachengLi1/AMP), held back by 70 W; "
        "memory as Jia et al. measured it: 220 of 320 GB/s (arXiv 1903.07486)",
        traffic_share=0.69,
    ),
    "V100-16": HalfPrecision(
        0.74, 0.15, "83 of 112.7 TFLOPS on the PCIe card (Markidis et al., arXiv 1803.04014)"
    ),
    "cpu": HalfPrecision(0.7, 0.5, "a guess: a CPU converts what it has no instructions for"),
    "default": HalfPrecision(0.67, 0.3, "a guess, below what H100 and A100 reach"),
}

HEADER = """\
# How much of its peaks a GPU kind reaches in training, as benchmarks/calibrate.py prints it;
# simulator/layer_costs/roofline.py says what each share means, docs/accuracy.md how well they do.
# [gpu]: in fp32; [half]: in bf16 and fp16, where memory and launches are those of fp32.

"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured block: what it asks of its GPU, and what it took."""

    gpu: str
    model: str
    tp: int
    micro_batch: int
    demand: Demand
    forward_s: float
    backward_s: float
    rate: float
    """Matrix products per second of the forward pass, in operations."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fit the roofline on measured profiles.")
    parser.add_argument("--profiles", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.profiles is None:
        print("Nothing fitted: name a folder of measured profiles with --profiles DIR.")
        return 0
    catalogue = load_catalogue()
    try:
        measurements = load_measurements(options.profiles, catalogue=catalogue)
        samples = [
            sample
            for name, family in FAMILIES.items()
            if name in measurements.paths
            for sample in samples_of(name, family, measurements, catalogue)
        ]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    kept, left_out = without_plain_fp32(samples, catalogue)
    for gpu, model in left_out:
        print(f"left out: {model} on {gpu} never beat the fp32 peak, so TF32 was off there")
    fitted, rows = dict[str, Calibration](), []
    for gpu in sorted({sample.gpu for sample in kept}):
        fitted[gpu], row = report(gpu, [sample for sample in kept if sample.gpu == gpu])
        rows.append(row)
    header = (
        *("GPU", "blocks", "compute share", "traffic share", "collective factor", "bwd/fwd"),
        *("launch ms", "seen: median %", "max", "unseen: median %", "mean", "max"),
    )
    print("", table(header, rows), sep="\n")
    print("\n" + toml_of(fitted))
    return 0


# -- what was measured ------------------------------------------------------------------------


def samples_of(
    name: str, family: str, measurements: Measurements, catalogue: Catalogue
) -> Iterable[Sample]:
    """Every measured block of a profile, with what the roofline says that it asks for."""
    profile = measurements.profile(name, catalogue=catalogue)
    network = Network(catalogue=catalogue, measured=measurements.network)
    roofline = Roofline(
        profiled_model(profile, family=family), profile.sequence, "fp32", False, catalogue, network
    )
    table = LayerTimeTable(
        profile, roofline, catalogue, lambda gpu: platform_of(gpu).profiled_hook_s
    )
    for gpu, tp, micro_batch in sorted(profile.timings):
        times = table.times(gpu, tp=tp, micro_batch=micro_batch)
        whole = roofline.demand(gpu, tp=tp, micro_batch=micro_batch)
        demand = Demand(*(getattr(whole, f.name)[[BLOCK]] for f in fields(Demand)))
        forward_s, backward_s = float(times.forward[BLOCK]), float(times.backward[BLOCK])
        operations = float(demand.compute_s[0]) * peak_flops(catalogue.gpu(gpu), "fp32")
        yield Sample(
            gpu, name, tp, micro_batch, demand, forward_s, backward_s, operations / forward_s
        )


def without_plain_fp32(
    samples: Sequence[Sample], catalogue: Catalogue
) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Leave out (GPU, model) pairs that were timed with TF32 switched off.

    The profiles do not say so, but on a GPU that has TF32 a model whose fastest block stays
    below the fp32 peak cannot have used it, and its neighbours went several times past it.
    """
    left_out = []
    for gpu, model in sorted({(sample.gpu, sample.model) for sample in samples}):
        peaks = catalogue.gpu(gpu).peak_flops
        best = max(s.rate for s in samples if (s.gpu, s.model) == (gpu, model))
        if peaks.get("tf32", 0.0) > 2 * peaks["fp32"] and best < peaks["fp32"]:
            left_out.append((gpu, model))
    return [s for s in samples if (s.gpu, s.model) not in left_out], left_out


# -- the fit ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Samples side by side, as the roofline's own formula takes them."""

    demand: Demand
    forward_s: Floats
    backward_s: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Blocks:
        columns = (np.concatenate([getattr(s.demand, f.name) for s in samples])
                   for f in fields(Demand))  # fmt: skip
        return cls(
            Demand(*columns),
            np.array([s.forward_s for s in samples]),
            np.array([s.backward_s for s in samples]),
        )

    def errors(self, calibration: Calibration) -> NDArray[np.float64]:
        """Predicted over measured less one, of forward and backward together."""
        forward, backward = calibration.seconds(self.demand)
        errors: NDArray[np.float64] = (forward + backward) / (self.forward_s + self.backward_s) - 1
        return errors

    def loss(self, calibration: Calibration) -> float:
        """Mean absolute logarithms, which a few odd measurements do not move much."""
        forward, backward = calibration.seconds(self.demand)
        both = np.log((forward + backward) / (self.forward_s + self.backward_s))
        ahead = np.log(forward / self.forward_s)
        pull = sum(
            np.log(getattr(calibration, name) / getattr(MIDDLE, name)) ** 2 for name in FITTED
        )
        return float(np.abs(both).mean() + FORWARD_WEIGHT * np.abs(ahead).mean() + PULL * pull)


def fit(samples: Sequence[Sample]) -> Calibration:
    """Walk each constant up and down in ever smaller steps until none of them helps."""
    blocks = Blocks.of(samples)
    best = MIDDLE
    least, step = blocks.loss(best), 0.5
    while step > 1e-3:
        before = least
        for name in FITTED:
            for factor in (np.exp(step), np.exp(-step)):
                value = float(min(getattr(best, name) * factor, CEILINGS.get(name, np.inf)))
                moved = replace(best, **{name: value})  # type: ignore[arg-type]  # all are floats
                loss = blocks.loss(moved)
                if loss < least - 1e-9:
                    best, least = moved, loss
        if least == before:
            step /= 2
    return best


def unseen_errors(samples: Sequence[Sample]) -> tuple[str, NDArray[np.float64]]:
    """Errors on each model (or TP degree) by a fit that has not seen it."""
    if len({s.model for s in samples}) > 1:
        return "model", _fit_without(samples, lambda s: s.model)
    return "TP degree", _fit_without(samples, lambda s: s.tp)


def _fit_without(
    samples: Sequence[Sample], part: Callable[[Sample], object]
) -> NDArray[np.float64]:
    errors = []
    for name in dict.fromkeys(part(s) for s in samples):
        seen = [s for s in samples if part(s) != name]
        unseen = Blocks.of([s for s in samples if part(s) == name])
        errors.append(np.abs(unseen.errors(fit(seen))))
    return np.concatenate(errors)


# -- report ----------------------------------------------------------------------------------


def report(gpu: str, samples: Sequence[Sample]) -> tuple[Calibration, list[str]]:
    """Fit one GPU kind; return the shares with the error found, and a row of the table."""
    found = fit(samples)
    seen = 100 * np.abs(Blocks.of(samples).errors(found))
    what, unseen = unseen_errors(samples)
    unseen = 100 * unseen
    shares = (found.compute_share, found.traffic_share, found.collective_factor)
    errors = (f"{np.median(seen):.1f}", f"{seen.max():.0f}", f"{np.median(unseen):.1f}")
    row = [
        *(gpu, str(len(samples)), *(f"{share:.3f}" for share in shares)),
        *(f"{found.backward_ratio:.2f}", f"{1e3 * found.launch_s:.2f}", *errors),
        *(f"{unseen.mean():.1f}", f"{unseen.max():.0f}"),
    ]
    models = ", ".join(dict.fromkeys(s.model for s in samples))
    degrees = ", ".join(map(str, sorted({s.tp for s in samples})))
    calibration = replace(
        found,
        relative_error=float(unseen.mean()) / 100,
        fitted_on=f"{len(samples)} blocks of {models} at TP {degrees}, fp32 ({SOURCE}); the "
        f"error is the mean on a {what} left out",
    )
    return calibration, row


def toml_of(fitted: dict[str, Calibration]) -> str:
    """The whole calibration file: the kinds fitted, and those that borrow from them."""
    entries = dict(fitted)
    for gpu, (nearest, error, why) in BORROWED.items():
        if nearest in fitted:
            entries[gpu] = replace(
                fitted[nearest], relative_error=error, fitted_on=f"nothing: as {nearest}, {why}"
            )
    # The faster a chip, the less of its peak it reaches, and an unknown kind is likely a new one.
    entries["default"] = Calibration(
        **{
            name: float(least([getattr(c, name) for c in fitted.values()]))
            for name in FITTED
            for least in (min if name == "compute_share" else np.median,)
        },
        relative_error=0.5,
        fitted_on="nothing: the middle of the fitted kinds, with the least share of products",
    )
    entries["cpu"] = Calibration(
        1.0, 1.0, 1.0, 2.0, 50e-6, 0.5, "nothing: the catalogue's rates of a CPU are guesses"
    )
    return HEADER + "\n\n".join(
        [
            f"[gpu.{gpu}]\n"
            + "\n".join(
                f"{name} = {getattr(entry, name):.3g}" for name in (*FITTED, "relative_error")
            )
            + f'\nfitted_on = "{entry.fitted_on}"'
            for gpu, entry in sorted(entries.items())
        ]
        + [
            f"[half.{gpu}]\ncompute_share = {half.compute_share:g}\n"
            + (f"traffic_share = {half.traffic_share:g}\n" if half.traffic_share else "")
            + f'relative_error = {half.relative_error:g}\nsource = "{half.source}"'
            for gpu, half in sorted(HALF.items())
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
