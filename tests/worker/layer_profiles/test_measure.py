"""Layers are measured as the runtime computes them; seconds and bytes have exact oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from simulator.documents.problems import InputError
from simulator.layer_costs.profile import Profile
from simulator.models.layers import CostSetup, Precision
from simulator.spec.job import Job
from tests.worker.tiny_models import MODELS, job_of
from worker.layer_profiles.device import CpuDevice
from worker.layer_profiles.growing_batches import DoesNotFitError
from worker.layer_profiles.measure import LayerFigures, figures, measure, measure_optimizer, rounds
from worker.layer_profiles.profile_job import HOSTS_DIFFER, Request, paced, profile_job
from worker.layer_profiles.short_model import ShortModel, distinct_layers

T = TypeVar("T")


@dataclass
class SteppedDevice:
    """A device of which each pass takes exactly as long as a script says, whatever it computes."""

    passes_s: Sequence[float] = (1.0,)
    memory_bytes: float = 1e12
    needed: list[float] = field(default_factory=list)
    now_s: float = 0.0
    taken: int = 0
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: str = "A100-40"
    name: str = "a stepped device"
    driver: str = "1"
    queued: int = 1
    host_s: float = 0.0
    """What the host takes to launch a pass."""
    host_at_s: float = 0.0

    def host_now(self) -> float:
        self.host_at_s += self.host_s
        return self.host_at_s

    def mark(self) -> float:
        self.now_s += self.passes_s[self.taken % len(self.passes_s)]
        self.taken += 1
        return self.now_s

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return [end - begin for begin, end in pairwise(marks)]

    def bytes_over(self, run: Callable[[], T]) -> tuple[T, int]:
        return run(), 0

    def check_fits(self, needed_bytes: float) -> None:
        self.needed.append(needed_bytes)
        if needed_bytes > self.memory_bytes:
            raise DoesNotFitError("it is too small")

    def now(self) -> float:
        return self.now_s


class Silent:
    """Remembers what the profiler reports."""

    def __init__(self) -> None:
        self.finished_of: list[str] = []
        self.ended_by: list[tuple[str, str]] = []

    def sampling(self, what: str, samples: int) -> None:
        pass

    def finished(self, what: str, figures: LayerFigures) -> None:
        assert figures.samples > 0
        self.finished_of.append(what)

    def ended(self, what: str, why: str) -> None:
        self.ended_by.append((what, why))


REQUEST = Request(tp=(), micro_batches=(), budget_s=1e9, name="tiny", date="2026-01-02")


def profiled(job: Job, device: SteppedDevice, reporter: Silent, **more: Any) -> Profile:
    request = replace(REQUEST, **more)
    return profile_job(job, None, request, device, reporter, now=device.now)


# -- what is computed ------------------------------------------------------------------------------


def test_equal_blocks_are_computed_once() -> None:
    model = MODELS["gpt2"](layers=6)
    assert distinct_layers(model) == ((0, 1, 7), (0, 1, 1, 1, 1, 1, 1, 2))


def test_layers_between_are_computed_where_widths_change() -> None:
    model = MODELS["gpt2"](layers=3)
    first, one, two, three, head = model.layers
    # Block 3 differs, and takes twice as much as the embedding hands on.
    wide = replace(two, output_per_token=2 * two.output_per_token)
    other = replace(three, allreduces_forward=9)
    changed = replace(model, layers=(first, one, wide, one, other, head))
    # wide is the second of its kind; `one` after it equals the first block.
    assert distinct_layers(changed) == ((0, 1, 2, 3, 4, 5), (0, 1, 2, 1, 4, 5))


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("tp", [1, 2])
def test_every_family_is_measured(name: str, tp: int) -> None:
    device, reporter = SteppedDevice(), Silent()
    found = profiled(job_of(name, max_tp=2), device, reporter, tp=(tp,), micro_batches=(2,))
    timing = found.timings["A100-40", tp, 2]
    assert timing.forward_s.tolist() == [1.0] * 4
    assert timing.backward_s.tolist() == [1.0] * 4
    assert timing.collectives == ("inside" if tp == 1 else "apart")
    assert timing.kept_bytes is not None
    assert (timing.kept_bytes > 0).all()


# -- seconds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queued", "expected_s"), [(1, 1.0), (3, 4.0)])
def test_host_that_is_slower_than_the_device_sets_the_pace(queued: int, expected_s: float) -> None:
    device = SteppedDevice(queued=queued, host_s=4.0)
    found = profiled(job_of("gpt2"), device, Silent(), micro_batches=(1,))
    timing = found.timings["A100-40", 1, 1]
    assert timing.forward_s.tolist() == [expected_s] * 4
    assert timing.backward_s.tolist() == [expected_s] * 4
    # Three quarters of the time are waits for the host, and hosts differ.
    assert timing.relative_error == (pytest.approx(0.75 * HOSTS_DIFFER) if queued > 1 else 0.0)


def test_passes_together_take_as_long_as_the_slower_of_device_and_host() -> None:
    blocks, head = 24, 1
    device = [0.5] * blocks + [4.0] * head
    found, waits_s = paced(device, [0.9] * blocks + [0.1] * head)
    assert waits_s == pytest.approx(24 * 0.9 + 0.1 - 16.0)
    assert found.sum() == pytest.approx(24 * 0.9 + 0.1)
    assert found[-1] == 4.0
    assert (found[:-1] > 0.5).all()
    # A device that is busy for longer hides the host.
    found, waits_s = paced(device, [0.6] * blocks + [0.1] * head)
    assert (found.tolist(), waits_s) == (device, 0.0)


def test_each_pass_gets_its_own_seconds_and_blocks_share_theirs() -> None:
    # Marks of a round: begin, forward of three layers, backward in reverse.
    device = SteppedDevice(passes_s=(0.0, 1.0, 2.0, 3.0, 30.0, 20.0, 10.0))
    found = profiled(job_of("gpt2"), device, Silent(), micro_batches=(1,))
    timing = found.timings["A100-40", 1, 1]
    assert timing.forward_s.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert timing.backward_s.tolist() == [10.0, 20.0, 20.0, 30.0]
    assert timing.measurement is not None
    assert (timing.measurement.spread, timing.measurement.date) == (0.0, "2026-01-02")


def test_time_between_queued_rounds_does_not_count() -> None:
    seconds = [1.0, 2.0, 99.0, 3.0, 4.0, 99.0, 5.0, 6.0]
    assert rounds(seconds, layers=1) == [[3.0, 4.0], [5.0, 6.0]]
    assert rounds([1.0, 2.0], layers=1) == [[1.0, 2.0]]


def test_figures_are_medians_with_their_spreads() -> None:
    found = figures([[1.0, 8.0], [2.0, 8.0], [3.0, 8.0]], [5], [7])
    assert (found.forward_s, found.backward_s) == ((2.0,), (8.0,))
    assert found.forward_spread == (0.25,)
    assert (found.backward_spread, found.spread) == ((0.0,), 0.05)


def test_optimizer_step_is_of_the_largest_block() -> None:
    job = job_of("gpt2-untied")
    device = CpuDevice()
    short = ShortModel(job, None, tp=1, device=device.place)
    found = measure_optimizer(short, device, now=lambda: 0.0, until_s=0.0)
    assert found is not None
    seconds, weights = found
    assert seconds > 0
    assert weights == short.buffers[1].master.numel() >= job.model.layers[1].parameters()


# -- bytes -----------------------------------------------------------------------------------------


def test_kept_bytes_of_a_block_are_those_that_the_simulator_counts() -> None:
    job = job_of("gpt2", precision="fp32")
    device = CpuDevice()
    short = ShortModel(job, None, tp=1, device=device.place)
    found = measure(short, 2, device, now=lambda: 0.0, until_s=0.0)
    setup = CostSetup(micro_batch=2, sequence=job.sequence, precision="fp32", flash=True)
    assert found.kept_bytes[1] == job.model.layers[1].kept_bytes(**setup)
    assert all(each > 0 for each in found.transient_bytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_keeps_and_takes_what_the_simulator_counts(precision: Precision) -> None:
    """Sailor's dropout switches flash attention off, and draws a number for each score."""
    model = MODELS["gpt2"](dropout=True, heads=8, sequence=256)
    job = replace(job_of("gpt2", precision=precision, dropout=0.3), model=model, sequence=256)
    device, block = CpuDevice(), model.layers[1]
    short = ShortModel(job, None, tp=1, device=device.place)
    found = measure(short, 2, device, now=lambda: 0.0, until_s=0.0)
    setup = CostSetup(micro_batch=2, sequence=256, precision=precision, flash=job.uses_flash)
    counted = block.kept_bytes(**setup)
    # Not counted: the causal mask, one for all heads and samples. A CPU keeps the two norms'
    # statistics in the precision of their input.
    statistics = 0 if precision == "fp32" else 2 * 2 * 2 * 2 * 256
    assert found.kept_bytes[1] == counted + 256 * 256 - statistics
    _, current = short.micro_batch(2)
    x = torch.randn(2, 256, 16, dtype=short.buffers[1].compute.dtype, requires_grad=True)
    _, peak = device.bytes_over(lambda: short.layer_by_layer()[1](x, current))
    transient = peak + x.untyped_storage().nbytes() - found.kept_bytes[1]
    # In fp32 a CPU, unlike a GPU, converts the mask to multiply by it, which takes more.
    converted = 2 * 8 * 256 * 256 if precision == "fp32" else 0
    assert block.workspace_bytes(**setup) == pytest.approx(transient - converted, rel=0.02)


def test_a_cpu_counts_what_its_allocator_gave() -> None:
    def run() -> torch.Tensor:
        passing = torch.zeros(1000)
        return torch.zeros(500) + passing[:500]

    _, peak = CpuDevice().bytes_over(run)
    assert peak == 4 * (1000 + 500 + 500)


# -- what does not fit -----------------------------------------------------------------------------


def test_what_does_not_fit_is_recorded() -> None:
    sizes = (50, 100, 200)
    wide = SteppedDevice()
    profiled(job_of("gpt2"), wide, Silent(), micro_batches=sizes)
    _weights, _of_50, of_100, of_200 = wide.needed
    reporter, tight = Silent(), SteppedDevice(memory_bytes=(of_100 + of_200) / 2)
    found = profiled(job_of("gpt2"), tight, reporter, micro_batches=sizes)
    assert found.micro_batches("A100-40", 1) == [50, 100]
    assert found.did_not_fit == {("A100-40", 1, 200)}
    assert reporter.ended_by == [("A100-40 TP 1 micro batch 200", "does not fit: it is too small")]


@dataclass
class FillingDevice(SteppedDevice, Silent):
    """A device that is full once the layers are measured."""

    finished_of: list[str] = field(default_factory=list)
    ended_by: list[tuple[str, str]] = field(default_factory=list)

    def mark(self) -> float:
        if self.finished_of:
            raise DoesNotFitError("it is full")
        return super().mark()


def test_an_optimizer_step_that_does_not_fit_is_no_measurement_of_one() -> None:
    device = FillingDevice()
    found = profiled(job_of("gpt2"), device, device, micro_batches=(2,))
    assert device.ended_by == [("A100-40 TP 1 optimizer step", "does not fit: it is full")]
    assert found.timings["A100-40", 1, 2].optimizer_s is None
    assert found.optimizer_parameters == {}


def test_micro_batches_are_powers_of_two_up_to_the_global_batch() -> None:
    found = profiled(job_of("gpt2", global_batch=6), SteppedDevice(), Silent())
    assert found.micro_batches("A100-40", 1) == [1, 2, 4]


def test_a_model_that_fits_at_no_micro_batch_is_an_error_with_its_cure() -> None:
    with pytest.raises(InputError) as caught:
        profiled(job_of("gpt2", max_tp=2), SteppedDevice(memory_bytes=1.0), Silent())
    (problem,) = caught.value.problems
    assert "micro batch of 1 at TP 2 does not fit a stepped device" in problem.what
    assert "--tp" in problem.cure


def test_a_cpu_is_not_filled_to_the_last_byte() -> None:
    device = CpuDevice(free_bytes=lambda: 1000.0)
    device.check_fits(900.0)
    with pytest.raises(DoesNotFitError, match="GiB are free"):
        device.check_fits(901.0)


def test_unusable_degrees_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        profiled(job_of("gpt2", max_tp=4), SteppedDevice(), Silent(), tp=(3, 8))
    assert {problem.place for problem in caught.value.problems} == {"--tp"}
    assert len(caught.value.problems) > 2


def test_sizes_are_those_of_the_model() -> None:
    job = job_of("llama", max_tp=2)
    found = profiled(job, SteppedDevice(), Silent(), micro_batches=(1,))
    assert sorted(found.sizes) == [1, 2]
    for tp, sizes in found.sizes.items():
        assert sizes.parameters == tuple(layer.parameters(tp) for layer in job.model.layers)
    assert np.array(found.sizes[2].kept_elements).sum() < sum(found.sizes[1].kept_elements)
