"""Builds the layers that one rank holds of a user's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job, ParameterGroup
from worker.data.datasets.map_dataset import MapData
from worker.data.generator_turns import turn_if_free
from worker.data.sample_checks import row_out_of_bounds
from worker.distributed.interface import Collective
from worker.layout.shards import shard_of, take_shard
from worker.layout.tensor_table import table_of
from worker.models.apply_plan import LocalTensor, Metrics
from worker.models.built_in.tensor_parallel import (
    EntryLinear,
    RowLinear,
    SharedEntry,
    TpGroup,
)
from worker.models.loss import whole_or_nan
from worker.models.random_numbers.generator_states import GeneratorStates, States
from worker.models.random_numbers.keyed_random import (
    FusedAttentionDropoutError,
    KeyedRandom,
    RandomnessError,
)
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.models.user_module.cut_module import CutModule
from worker.models.user_module.module_cut import Call, ModuleCut
from worker.models.user_module.module_skeleton import move_skeleton, set_parameter
from worker.models.user_module.module_splits import ModuleSplits
from worker.types import LogicalTensor

T = TypeVar("T")


class ModuleSource(Protocol):
    """A user's module: its code, its initial weights, how it is called, and its loss."""

    @property
    def cut(self) -> ModuleCut:
        """Where the module is cut."""

    @property
    def splits(self) -> ModuleSplits:
        """Which parts of its blocks may be split."""

    def skeleton(self) -> nn.Module:
        """Make the module with zeros that take no memory as its parameters."""

    def value(self, name: str) -> Tensor:
        """Return the initial value of a parameter."""

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter is trained."""

    def group_of(self, name: str) -> ParameterGroup:
        """Return the optimizer's settings of a parameter."""

    def schedules(self, step: int) -> tuple[float, ...]:
        """Return the factor of each schedule on the learning rate at a step."""

    def settings_digests(self) -> Mapping[str, int]:
        """Return digests of the settings that the described job does not hold, by name."""

    def call(self, module: nn.Module, batch: Any) -> Any:
        """Call the module with a batch."""

    def losses(self, output: Any, batch: Any) -> tuple[Tensor, int | Tensor]:
        """Return the sum of the losses of what the module returned, and over how many it is."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics of an evaluation."""

    def metrics(self, output: Any, batch: Any) -> Metrics:
        """Return the loss and other metrics of an evaluation, each as a sum and a count."""

    def report(self, step: int, values: Mapping[str, float]) -> str:
        """Hand figures to loggers and callbacks; return why loggers are not used any more."""

    def end_report(self) -> None:
        """Close the loggers: no more figures come."""

    def evaluation_after(self, step: int) -> MapData | None:
        """Return the data of the evaluation that follows a step, if one does."""


@dataclass(slots=True)
class ModuleLayer:
    """One layer of a user's module as a rank holds it."""

    index: int
    tensors: tuple[LocalTensor, ...]
    module: CutModule
    source: ModuleSource
    context: MicroBatchContext
    generators: GeneratorStates
    entry: SharedEntry | None = None
    draws: dict[int, bool] = field(default_factory=dict)
    """Whether code draws random numbers, by the layer that keys them, once it has run."""
    suspects: set[int] = field(default_factory=set)
    """Those in whose last pass a generator of Python or numpy has moved."""
    plain_attention: bool = False
    """Compute attention without fused kernels, which drop elements in their own way."""

    def __call__(self, x: Tensor) -> Tensor:
        current = self._current()
        if self.index == 0:
            return self._compute_by_sample(current, lambda _: self.module.embed(current.inputs))
        assert self.index + 1 < self.module.cut.layers, "the head is computed with its loss"
        if current.block_arguments is None:
            # The code before the blocks draws the same numbers wherever it runs.
            current.block_arguments = self._compute_by_sample(
                current, lambda _: self.module.arguments(current.inputs), layer=0
            )
        arguments = current.block_arguments
        out = self._compute_by_sample(
            current,
            lambda _: self.module.block(self.index - 1, x, arguments),
            layer=self.index,
        )
        if self.entry is not None:
            self.entry.clear()
        return out

    def losses(self, x: Tensor, current: MicroBatch) -> Tensor:
        """Compute this layer, which must be the head, and the sum of the losses."""

        def compute(random: KeyedRandom | None) -> Tensor:
            output = self._output(x, current, random)
            try:
                total, count = self.source.losses(output, current.inputs)
            except (IndexError, RuntimeError) as error:
                row = row_out_of_bounds(error, current.inputs)
                if row is not None:
                    position = int(current.samples[row])
                    error.add_note(
                        f"in labels of the sample at step {current.step}, position {position}"
                    )
                raise
            current.label_count = whole_or_nan(count)
            return total

        return self._compute_by_sample(current, compute)

    def output(self, x: Tensor, current: MicroBatch, call: Call | None = None) -> Any:
        """Compute this layer, which must be the head; ``call`` calls the module in another way."""
        return self._compute_by_sample(
            current, lambda random: self._output(x, current, random, call)
        )

    def _output(
        self,
        x: Tensor,
        current: MicroBatch,
        random: KeyedRandom | None,
        call: Call | None = None,
    ) -> Any:
        def own_numbers() -> None:
            if random is not None:
                random.begin_layer(self.index)

        return self.module.head(x, current.inputs, at_last_block=own_numbers, call=call)

    def _compute_by_sample(
        self, current: MicroBatch, compute: Callable[[KeyedRandom | None], T], *, layer: int = 0
    ) -> T:
        """Compute with random numbers that depend on the samples alone.

        Watching takes time, so code that drew nothing in its first pass is watched only while a
        data set uses the generators. If they have moved after another pass, that one is computed
        again.
        """
        was_quiet = self.draws.get(layer) is False
        if was_quiet and self.entry is None:
            with turn_if_free() as is_mine:
                if is_mine:
                    before = self.generators.read()
                    found = compute(None)
                    if self.generators.read() == before:
                        return found
                    del found
        elif was_quiet:
            # Ranks that share a layer cannot compute it again each by itself. A turn would make a
            # rank that loads samples wait for one that waits for it, if both are of one process.
            seen = self.generators.read_if_free()
            if seen is not None:
                found = compute(None)
                if self.generators.moved_since(seen).of_torch:
                    raise self._late_draws()
                self._others_have_moved(seen, layer)
                return found
        random, seen = KeyedRandom(current, layer=layer), self.generators.read_if_free()
        try:
            if self.plain_attention:
                with sdpa_kernel(SDPBackend.MATH), random:
                    found = compute(random)
            else:
                with random:
                    found = compute(random)
        except FusedAttentionDropoutError:
            self.plain_attention = True
            return self._compute_by_sample(current, compute, layer=layer)
        except RandomnessError as error:
            cure = "draw with the samples first, or leave it out"
            raise InputError(Problem(self._place(), str(error), cure)) from None
        finally:
            # Evaluations do not count, since dropout draws nothing in them.
            if self.module.module.training:
                self.draws[layer] = self.draws.get(layer, False) or random.has_drawn
        if was_quiet and random.has_drawn and self.entry is not None:
            raise self._late_draws()
        if self._others_have_moved(seen, layer) and self.entry is None:
            return self._compute_by_sample(current, compute, layer=layer)
        return found

    def _others_have_moved(self, before: States | None, layer: int) -> bool:
        """Return whether Python's or numpy's generator has moved; refuse two passes in a row.

        In one of them another thread may have drawn.
        """
        have_moved = self.generators.moved_since(before).of_others
        if have_moved and layer in self.suspects:
            what = "draws numbers by Python's random or by numpy while it computes"
            cure = "draw them by torch, once for each sample"
            raise InputError(Problem(self._place(), what, cure))
        (self.suspects.add if have_moved else self.suspects.discard)(layer)
        return have_moved

    def _late_draws(self) -> InputError:
        what = "draws random numbers in a later pass than its first, and several ranks share it"
        cure = "draw in every pass, or give sailor.Trainer(..., max_tp=1)"
        return InputError(Problem(self._place(), what, cure))

    def _place(self) -> str:
        return f"model: {self.module.cut.layer_name(self.index)}"

    def metrics(self, x: Tensor, current: MicroBatch) -> Metrics:
        """Compute this layer, which must be the head, and the metrics of an evaluation."""
        return self.source.metrics(self.output(x, current), current.inputs)

    def set_training(self, on: bool) -> None:
        """Switch the module between training, with dropout, and evaluation."""
        self.module.set_training(on)

    def _current(self) -> MicroBatch:
        assert self.context.current is not None, "no micro batch is set"
        return self.context.current


def build_module_layers(
    source: ModuleSource,
    job: Job,
    indices: Sequence[int],
    *,
    tp: int,
    tp_index: int,
    group: Collective | None,
    context: MicroBatchContext,
    master: torch.dtype,
    compute: torch.dtype,
    device: torch.device | str,
) -> list[ModuleLayer]:
    """Build some layers of a user's module; parameters of the others take no memory."""
    assert (group is None) == (tp == 1), "ranks that share a layer need a group"
    if tp > 1 and source.splits.max_tp % tp:
        why = source.splits.why_not_more or f"no more than {source.splits.max_tp} can"
        cure = "install the packages with which the job was submitted"
        raise InputError(Problem("model", f"cannot be split over {tp} ranks here: {why}", cure))
    skeleton, cut = source.skeleton(), source.cut
    move_skeleton(skeleton, device=device, dtype=compute)
    module = CutModule(skeleton, cut, source.call)
    each = job.max_tp // tp
    held = range(tp_index * each, (tp_index + 1) * each)
    shared: dict[str, nn.Parameter] = {}

    def fill(index: int, spec: LogicalTensor, dtype: torch.dtype) -> nn.Parameter:
        name = cut.full_name(index, spec.name)
        first = cut.alias_of.get(name, name)
        if first not in shared:
            whole = source.value(first)
            shard = whole
            if spec.split_dim is not None:
                shard = take_shard(whole, shard_of(spec, held, of=job.max_tp))
            shared[first] = nn.Parameter(
                shard.to(device=device, dtype=dtype), requires_grad=source.is_trained(first)
            )
        # Under all its names: which of them the code of this layer uses is not known.
        for each in {first, *(a for a, owner in cut.alias_of.items() if owner == first)}:
            set_parameter(skeleton, each, shared[first])
        return shared[first]

    layers, generators = [], GeneratorStates(skeleton)
    for index in indices:
        splitting = None if group is None else TpGroup(group)
        entry = None if splitting is None else SharedEntry(splitting)
        if entry is not None and splitting is not None and 0 < index < cut.layers - 1:
            _split(skeleton, source.splits, cut.blocks[index - 1], entry, splitting)
        tensors = tuple(
            LocalTensor(spec, fill(index, spec, master)) for spec in table_of(job, index)
        )
        for spec in table_of(job, index, frozen=True):
            fill(index, spec, compute)
        layers.append(ModuleLayer(index, tensors, module, source, context, generators, entry))
    return layers


def _split(
    skeleton: nn.Module, splits: ModuleSplits, block: str, entry: SharedEntry, group: TpGroup
) -> None:
    """Replace the linear layers of a block by one rank's parts."""
    for path, kind in splits.kinds.items():
        if not path.startswith(f"{block}.") or kind == "partial":
            continue
        whole = skeleton.get_submodule(path)
        assert isinstance(whole, nn.Linear), "only linear layers are declared"
        if kind in ("rows", "adapter rows"):
            part: nn.Module = RowLinear(whole, group)
        else:
            part = EntryLinear(whole, entry if kind == "columns" else group.begin)
        skeleton.set_submodule(path, part)
