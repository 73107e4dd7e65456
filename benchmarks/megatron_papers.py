"""Predict the runs of two papers on Megatron-LM, on which no constant was fitted.

    python -m benchmarks.megatron_papers

The runs are those of Narayanan et al., *Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM* (SC'21), table 1, and of Korthikanti et al., *Reducing Activation
Recomputation in Large Transformer Models* (2022), table 5: GPT of 1.7 B to 1 T parameters on 8 to
1,536 GPUs of machines with eight A100-80 and eight NICs of 200 Gbit/s.

SC'21 states TFLOPS, from which its formula gives seconds, and no micro batch: the fastest
prediction of sizes up to 16 counts, under 1F1B. Where the later paper recomputes the scores of
attention alone, predictions recompute nothing: the sums for it are 3 % of its work at most.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sailord.text.table import table
from simulator.api import Measurements
from simulator.documents.files import Document
from simulator.hardware.catalogue import load_catalogue
from simulator.validate_runs import Comparison, validate

VOCABULARY, SEQUENCE, TP_MAX = 51200, 2048, 8
MICRO_BATCHES = (1, 2, 4, 8, 16)
CATALOGUE = Path(__file__).with_suffix(".toml")
MACHINE = "selene-a100x8"


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One row of a table."""

    name: str
    hidden: int
    layers: int
    heads: int
    tp: int
    stages: int
    gpus: int
    batch: int
    seconds: float
    micro_batch: int | None = None
    """``None``: the paper does not say."""
    chunks: int = 1
    recomputes_all: bool = True
    """If not, ranks share tokens, and the scores of attention alone are recomputed."""


def sc21(name: str, shape: tuple[int, int, int], tp: int, stages: int, *rest: int) -> PaperRun:
    """A row of SC'21: heads, hidden size and layers; then GPUs, batch and TFLOPS of each GPU."""
    heads, hidden, layers = shape
    gpus, batch, tflops = rest
    ends = SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    flops = 96 * batch * SEQUENCE * layers * hidden**2 * (1 + ends)
    seconds = flops / (gpus * tflops * 1e12)
    return PaperRun(f"SC'21 {name}", hidden, layers, heads, tp, stages, gpus, batch, seconds)


def recomputing(
    name: str, shape: tuple[int, int, int], stages: int, chunks: int, *given: float
) -> tuple[PaperRun, PaperRun]:
    """A row of the later paper: batch, micro batch, and seconds of its two ways."""
    heads, hidden, layers = shape
    batch, micro_batch, full_s, selective_s = given
    about = hidden, layers, heads, TP_MAX, stages, TP_MAX * stages, int(batch)
    more = int(micro_batch), chunks
    return (
        PaperRun(f"2022 {name}, full", *about, full_s, *more),
        PaperRun(f"2022 {name}, selective", *about, selective_s, *more, recomputes_all=False),
    )


RUNS = (
    sc21("1.7B", (24, 2304, 24), 1, 1, 32, 512, 137),
    sc21("3.6B", (32, 3072, 30), 2, 1, 64, 512, 138),
    sc21("7.5B", (32, 4096, 36), 4, 1, 128, 512, 142),
    sc21("18.4B", (48, 6144, 40), 8, 1, 256, 1024, 135),
    sc21("39.1B", (64, 8192, 48), 8, 2, 512, 1536, 138),
    sc21("76.1B", (80, 10240, 60), 8, 4, 1024, 1792, 140),
    sc21("145.6B", (96, 12288, 80), 8, 8, 1536, 2304, 148),
    *recomputing("22B", (64, 6144, 48), 1, 1, 4, 4, 1.42, 1.10),
    *recomputing("175B", (96, 12288, 96), 8, 3, 64, 1, 18.13, 13.75),
    *recomputing("530B", (128, 20480, 105), 35, 3, 280, 1, 49.05, 37.83),
    *recomputing("1T", (160, 25600, 128), 64, 1, 512, 1, 94.42, 71.49),
)


def documents(run: PaperRun) -> Iterator[dict[str, Any]]:
    """Yield the run as ``sailorctl validate`` reads it, with each micro batch that it may have."""
    recompute = "full" if run.recomputes_all else "none"
    pipelines = run.gpus // (run.tp * run.stages)
    each = run.layers // (run.stages * run.chunks)
    ends = [1 + each * n for n in range(1, run.stages * run.chunks)]
    bounds = [0, *ends, run.layers + 2]
    place = {"gpu": "A100-80", "machine": MACHINE, "zone": "lab"}
    stages = [
        {"layers": [first, end], "tp": run.tp, "recompute": recompute, **place}
        for first, end in itertools.pairwise(bounds)
    ]
    of_pipeline = run.batch // pipelines
    sizes = MICRO_BATCHES if run.micro_batch is None else (run.micro_batch,)
    for size in sizes:
        if of_pipeline % size:
            continue
        yield {
            "id": f"{run.name}, micro batch {size}",
            "source": run.name,
            "job": {
                "model": {
                    "family": "gpt2",
                    "layers": run.layers,
                    "hidden": run.hidden,
                    "heads": run.heads,
                    "ffn": 4 * run.hidden,
                    "vocab": VOCABULARY,
                    "tied": True,
                    "sequence": SEQUENCE,
                },
                "training": {
                    "global_batch": run.batch,
                    "sequence": SEQUENCE,
                    "precision": "fp16",
                    "optimizer": "adam",
                    "recompute": recompute,
                    "max_tp": TP_MAX,
                    "flash_attention": False,
                    "zero": 0,
                    "dropout": 0.1,
                    "gradient_sync": "serial",
                    "runtime": "megatron-deepspeed",
                },
            },
            "cluster": {"pool": [{**place, "gpus": run.gpus}]},
            "plan": {
                "micro_batch_size": size,
                "schedule": "1f1b" if run.chunks == 1 else "interleaved",
                "virtual_stages": run.chunks,
                "sequence_parallel": not run.recomputes_all,
                "pipelines": [{"micro_batches": of_pipeline // size, "stages": stages}] * pipelines,
            },
            "measured": {"iteration_s": run.seconds},
        }


def main() -> None:
    """Print one row per run, and the mean error."""
    every = {"runs": [document for run in RUNS for document in documents(run)]}
    report = validate(
        Document("runs", every), measurements=Measurements(), catalogue=load_catalogue(CATALOGUE)
    )
    for name, why in report.failures:
        print(f"{name}: {why}")
    found = [
        min(tried, key=lambda one: one.time_predicted_s) for tried in report.by_source().values()
    ]
    print(table(["run", "GPUs", "measured s", "predicted s", "error"], [*map(row, found)]))
    errors = [abs(one.time_error_pct or 0.0) for one in found]
    inside = sum(bool(one.is_inside) for one in found)
    print(
        f"\nmean error {statistics.fmean(errors):.1f} %, median {statistics.median(errors):.1f} %;"
        f" {inside} of {len(found)} runs lie inside their error bars"
    )


def row(found: Comparison) -> list[str]:
    """One line of the table."""
    times = f"{found.time_measured_s:.2f}", f"{found.time_predicted_s:.2f}"
    return [
        found.case,
        str(sum(found.plan.gpus_used().values())),
        *times,
        f"{found.time_error_pct:+.1f} %",
    ]


if __name__ == "__main__":
    main()
