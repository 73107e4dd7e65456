"""Aceso's inputs, its configurations, and its estimates of their time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

AcesoKey = tuple[int, int]
"""Samples of a replica's micro batch and tensor degree, by which profiles are looked up."""
AcesoRow = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AcesoInputs:
    """Aceso's inputs: a profile of every operator on one GPU kind, and two bandwidths."""

    forward_ms: Mapping[AcesoKey, AcesoRow]
    backward_ms: Mapping[AcesoKey, AcesoRow]
    in_mb: Mapping[AcesoKey, AcesoRow]
    out_mb: Mapping[AcesoKey, AcesoRow]
    weights_mb: Mapping[AcesoKey, AcesoRow]
    kept_mb: Mapping[AcesoKey, AcesoRow]
    scratch_forward_mb: Mapping[AcesoKey, AcesoRow]
    scratch_backward_mb: Mapping[AcesoKey, AcesoRow]
    within_mb_per_ms: float
    between_mb_per_ms: float
    gpus: int
    gpus_per_node: int
    memory_mb: float
    batch: int
    micro_batches: tuple[int, ...]
    """Sizes to try, all replicas of a stage together, ascending."""
    tp_max: int
    copies_main: int = 0
    """Full-precision copies of the weights."""
    copies_optimizer: int = 2

    @property
    def operators(self) -> int:
        return len(next(iter(self.forward_ms.values())))


@dataclass(frozen=True, slots=True)
class AcesoRepairs:
    """The defects of the public program that are mended."""

    all_gpus: bool = True
    """If false, the first configuration gives no stage more GPUs than the largest tensor degree."""
    last_output: bool = True
    """If false, the last stage pays for sending the logits, although no stage follows."""
    sync: bool = True
    """If false, summing gradients is free."""
    any_size: bool = True
    """If false, a stage has at most eight GPUs."""


FIXED = AcesoRepairs()
PUBLISHED = AcesoRepairs(False, False, False, False)


class AcesoStage(NamedTuple):
    """Operators ``first`` to ``end - 1`` on ``d`` replicas of ``t`` GPUs."""

    first: int
    end: int
    t: int
    d: int

    @property
    def gpus(self) -> int:
        return self.t * self.d


@dataclass(frozen=True, slots=True, order=True)
class AcesoConfig:
    """A state of the search: one micro batch size for all, and the stages."""

    micro_batch: int
    stages: tuple[AcesoStage, ...]

    @property
    def gpus(self) -> int:
        return sum(stage.gpus for stage in self.stages)


@dataclass(frozen=True, slots=True)
class AcesoPlan:
    """The best configuration of a number of stages."""

    ms: float
    config: AcesoConfig


class AcesoModel:
    """Estimates stages and configurations; each stage is judged once."""

    def __init__(self, inputs: AcesoInputs, repairs: AcesoRepairs = FIXED) -> None:
        self.inputs, self.repairs = inputs, repairs
        self.samples_max = max(b for b, _ in inputs.forward_ms)
        self._last = inputs.operators
        self._compute: dict[tuple[AcesoStage, int], float] = {}
        self._predicted: dict[tuple[AcesoStage, int], float] = {}
        self._memory: dict[tuple[AcesoStage, int, int], float] = {}
        self._judged: dict[AcesoConfig, AcesoJudged] = {}

    def key(self, stage: AcesoStage, micro_batch: int) -> AcesoKey | None:
        """The profile's key of a stage; ``None`` if it was not measured."""
        samples, rest = divmod(micro_batch, stage.d)
        key = samples, stage.t
        return key if rest == 0 and key in self.inputs.forward_ms else None

    def compute_ms(self, stage: AcesoStage, micro_batch: int) -> float:
        """Forward and backward of one micro batch."""
        found = self._compute.get((stage, micro_batch))
        if found is None:
            key = self.key(stage, micro_batch)
            assert key is not None, (stage, micro_batch)
            layers = slice(stage.first, stage.end)
            found = sum(self.inputs.forward_ms[key][layers])
            found += sum(self.inputs.backward_ms[key][layers])
            self._compute[stage, micro_batch] = found
        return found

    def whole_ms(self, stage: AcesoStage, micro_batch: int) -> float:
        """The same on one GPU; micro batches beyond the profile take in proportion."""
        samples = min(micro_batch, self.samples_max)
        alone = AcesoStage(stage.first, stage.end, 1, 1)
        return self.compute_ms(alone, samples) * micro_batch / samples

    def message_ms(
        self, stage: AcesoStage, micro_batch: int, *, slow_in: bool = False, slow_out: bool = False
    ) -> float:
        """Receiving a stage's input and sending its output, over links within or between nodes."""
        inputs, key = self.inputs, self.key(stage, micro_batch)
        assert key is not None, (stage, micro_batch)
        speeds = inputs.within_mb_per_ms, inputs.between_mb_per_ms
        into = inputs.in_mb[key][stage.first] / speeds[slow_in]
        if self.repairs.last_output and stage.end == self._last:
            return into
        return into + inputs.out_mb[key][stage.end - 1] / speeds[slow_out]

    def predicted_ms(self, stage: AcesoStage, micro_batch: int) -> float:
        """The time that actions expect of a stage (quirk, kept: links as within a node)."""
        known = (stage, micro_batch)
        if known not in self._predicted:
            self._predicted[known] = self.compute_ms(*known) + self.message_ms(*known)
        return self._predicted[known]

    def memory_mb(self, stage: AcesoStage, micro_batch: int, *, behind: int) -> float:
        """Memory of each GPU of a stage with ``behind`` stages after it."""
        known = (stage, micro_batch, behind)
        if known not in self._memory:
            self._memory[known] = self._held_mb(*known)
        return self._memory[known]

    def _held_mb(self, stage: AcesoStage, micro_batch: int, behind: int) -> float:
        inputs, key = self.inputs, self.key(stage, micro_batch)
        assert key is not None, (stage, micro_batch)
        layers = slice(stage.first, stage.end)
        weights = sum(inputs.weights_mb[key][layers])
        held = inputs.in_mb[key][stage.first] + sum(inputs.kept_mb[key][layers])
        # The scratch space of a stage's last operator is forgotten (quirk, kept).
        all_but_last = slice(stage.first, stage.end - 1)
        scratch = sum(
            max(rows[key][all_but_last], default=0.0)
            for rows in (inputs.scratch_forward_mb, inputs.scratch_backward_mb)
        )
        copies = 1 + inputs.copies_main + 1 + inputs.copies_optimizer
        return weights * copies + held * (behind + 1) + max(scratch, weights)

    def sync_ms(self, stage: AcesoStage) -> float:
        """Summing a stage's gradients around a ring."""
        if not self.repairs.sync or stage.d == 1:
            return 0.0
        inputs = self.inputs
        weights = sum(inputs.weights_mb[1, stage.t][stage.first : stage.end])
        far = stage.gpus > inputs.gpus_per_node
        speed = inputs.between_mb_per_ms if far else inputs.within_mb_per_ms
        return 2 * (stage.d - 1) / stage.d * weights / speed

    def judge(self, config: AcesoConfig) -> AcesoJudged:
        if config not in self._judged:
            self._judged[config] = AcesoJudged(config, self)
        return self._judged[config]


class AcesoJudged:
    """A configuration with the figures that the search needs, per stage."""

    def __init__(self, config: AcesoConfig, model: AcesoModel) -> None:
        self.config, self.model = config, model
        inputs, size, stages = model.inputs, config.micro_batch, config.stages
        ranks, node = 0, inputs.gpus_per_node
        self.slow: list[tuple[bool, bool]] = []
        self.step_ms: list[float] = []
        for stage in stages:
            slow_in = ranks > 0 and ranks % node == 0
            ranks += stage.gpus
            slow_out = ranks % node == 0
            self.slow.append((slow_in, slow_out))
            message = model.message_ms(stage, size, slow_in=slow_in, slow_out=slow_out)
            self.step_ms.append(model.compute_ms(stage, size) + message)
        fill = sum(self.step_ms)
        self.times_ms = [
            step * (inputs.batch / size - 1) + fill + model.sync_ms(stage)
            for step, stage in zip(self.step_ms, stages, strict=True)
        ]
        self.memory_mb = [
            model.memory_mb(stage, size, behind=len(stages) - 1 - index)
            for index, stage in enumerate(stages)
        ]
        self.ms = max(self.times_ms)
        self.fits = max(self.memory_mb) <= inputs.memory_mb

    @cached_property
    def compute_ms(self) -> list[float]:
        return [self.model.compute_ms(s, self.config.micro_batch) for s in self.config.stages]

    @cached_property
    def ideal_ms(self) -> list[float]:
        """Compute time of each GPU if dividing work cost nothing."""
        size = self.config.micro_batch
        return [self.model.whole_ms(stage, size) / stage.gpus for stage in self.config.stages]

    @cached_property
    def loss_ms(self) -> list[float]:
        return [own - ideal for own, ideal in zip(self.compute_ms, self.ideal_ms, strict=True)]

    @cached_property
    def efficient_ms(self) -> list[float]:
        """Time that a stage could take over: its idle time, less where memory is short."""
        limit, found = self.model.inputs.memory_mb, []
        for index, stage in enumerate(self.config.stages):
            ahead = self.ms - self.times_ms[index]
            memory = self.memory_mb[index]
            room = (limit - memory) / memory * self.times_ms[index]
            idle = ahead if room > ahead else room + (ahead - room) / 2
            size = min(self.config.micro_batch, self.model.samples_max)
            alone = AcesoStage(stage.first, stage.end, 1, 1)
            slow_in, slow_out = self.slow[index]
            message = self.model.message_ms(alone, size, slow_in=slow_in, slow_out=slow_out)
            whole = (self.model.compute_ms(alone, size) + message) * self.config.micro_batch / size
            # The idle time of all GPUs, by how well they use it: the GPUs cancel out.
            found.append(idle * whole / self.step_ms[index])
        return found
