"""A model as an ordered list of layers, each with its parameters, FLOPs, activations and traffic.

Layers are data: counts that are linear in the batch and at most quadratic in the sequence.
Families (``simulator.models.transformer_block``), Hugging Face configs and descriptions of a
user's own model all produce them. ``docs/models.md`` says what is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal, NotRequired, TypedDict, Unpack, get_args

from simulator.documents.problems import Problem
from simulator.models.architecture import Architecture

Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "full"]
"""Whether activations are kept for the backward pass, or recomputed in it."""
LayerKind = Literal["embedding", "block", "head"]
# "float" has the width of the training precision; the others have a fixed width.
Item = Literal["float", "fp32", "mask", "index"]
# "eager" attention writes its score matrices to memory; "flash" does not. The kernels of eager
# attention may differ between fp32 and 16-bit precision.
When = Literal["always", "eager", "eager fp32", "eager 16-bit", "flash"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FLOAT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FIXED_ITEM_BYTES: dict[Item, int] = {"fp32": 4, "mask": 1, "index": 8}


@dataclass(frozen=True, slots=True)
class Term:
    """An element count: fixed + batch x (sample + sequence x token + sequence^2 x pair)."""

    name: str
    fixed: int = 0
    per_sample: int = 0
    per_token: int = 0
    per_pair: int = 0
    # Into how many pieces tensor parallelism can split it at most; 1: every rank has it whole.
    ways: int = 1
    item: Item = "float"
    when: When = "always"

    def elements(self, *, micro_batch: int, sequence: int, tp: int, flash: bool = False) -> float:
        """Return the element count of one tensor-parallel rank."""
        if self.when != "always" and (self.when == "flash") != flash:
            return 0.0
        per_batch = self.per_sample + sequence * (self.per_token + sequence * self.per_pair)
        return (self.fixed + micro_batch * per_batch) / min(tp, self.ways)

    def bytes(
        self,
        *,
        micro_batch: int,
        sequence: int,
        tp: int = 1,
        precision: Precision,
        flash: bool = False,
    ) -> float:
        """Return the bytes of one tensor-parallel rank."""
        if self.when == ("eager 16-bit" if precision == "fp32" else "eager fp32"):
            return 0.0
        width = FLOAT_BYTES[precision] if self.item == "float" else FIXED_ITEM_BYTES[self.item]
        return width * self.elements(micro_batch=micro_batch, sequence=sequence, tp=tp, flash=flash)


class CostSetup(TypedDict):
    """The training setup that a layer's bytes depend on."""

    micro_batch: int
    sequence: int
    tp: NotRequired[int]
    precision: Precision
    flash: NotRequired[bool]


def _bytes(terms: tuple[Term, ...], **setup: Unpack[CostSetup]) -> float:
    return sum(term.bytes(**setup) for term in terms)


@dataclass(frozen=True, slots=True)
class PassPoint:
    """A point in a pass: transient tensors, less kept ones that do not exist at that point."""

    name: str
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter tensor and how tensor parallelism splits it."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None
    # Into how many pieces it can be split at most (heads, FFN width, vocabulary); beyond that,
    # ranks hold copies.
    ways: int = 1
    # The tensor of another layer that this one is shared with: "layer name/tensor name".
    tied_to: str | None = None
    # It keeps its value: it has no gradient and no moments.
    frozen: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def rank_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one rank holds; an uneven split is padded."""
        if self.split_dim is None:
            return self.shape
        pieces = min(tp, self.ways)
        cut = -(-self.shape[self.split_dim] // pieces)
        return (*self.shape[: self.split_dim], cut, *self.shape[self.split_dim + 1 :])

    def rank_elements(self, tp: int) -> int:
        return math.prod(self.rank_shape(tp))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model: its tensors, and its costs as functions of the training setup."""

    name: str
    kind: LayerKind
    tensors: tuple[TensorSpec, ...]
    # Forward FLOPs, a multiply-add counted as two.
    flops: tuple[Term, ...]
    # What autograd keeps from forward until backward, including the input if it keeps that.
    kept: tuple[Term, ...]
    # What is kept under full recomputation instead; empty: the layer is never recomputed.
    checkpoint: tuple[Term, ...]
    # The transient peak is the largest of these moments.
    moments: tuple[PassPoint, ...]
    # Elements read and written in the forward pass, parameters apart.
    traffic: tuple[Term, ...]
    # Elements per token that a pipeline boundary after this layer sends.
    output_per_token: int
    # Tensor-parallel all-reduces, and the elements of each per token.
    allreduces_forward: int
    allreduces_backward: int
    allreduce_per_token: int

    def parameters(self, tp: int = 1) -> int:
        """Return the trained parameters that one tensor-parallel rank holds."""
        return sum(tensor.rank_elements(tp) for tensor in self.tensors if not tensor.frozen)

    def frozen_parameters(self, tp: int = 1) -> int:
        """Return the parameters that keep their value, of one tensor-parallel rank."""
        return sum(tensor.rank_elements(tp) for tensor in self.tensors if tensor.frozen)

    def forward_flops(self, *, micro_batch: int, sequence: int, tp: int = 1) -> float:
        """Return one rank's FLOPs in forward, matrix products only.

        Attention scores count in full despite the causal mask: kernels without flash attention
        compute all of them.
        """
        return sum(
            term.elements(micro_batch=micro_batch, sequence=sequence, tp=tp) for term in self.flops
        )

    def backward_over_forward(self) -> float:
        """Return the FLOPs of backward relative to forward.

        Gradients of activations take as many, and so do gradients of weights if all are trained.
        """
        trained, frozen = self.parameters(), self.frozen_parameters()
        return 1 + (trained / (trained + frozen) if frozen else 1)

    def output_elements(self, sequence: int) -> int:
        """Return the elements that a pipeline boundary after this layer sends per sample."""
        return self.output_per_token * sequence

    def allreduce_elements(self, *, micro_batch: int, sequence: int) -> int:
        """Return the elements of one tensor-parallel all-reduce."""
        return self.allreduce_per_token * micro_batch * sequence

    def kept_bytes(self, *, recompute: Recompute = "none", **setup: Unpack[CostSetup]) -> float:
        """Return the bytes that one rank keeps per micro batch from forward until backward."""
        is_checkpointed = recompute == "full" and self.checkpoint
        return _bytes(self.checkpoint if is_checkpointed else self.kept, **setup)

    def workspace_bytes(
        self, *, recompute: Recompute = "none", **setup: Unpack[CostSetup]
    ) -> float:
        """Return one rank's peak of transient bytes, beyond the kept ones, while the layer runs.

        With full recomputation this includes the layer's recomputed activations.
        """
        peak = max(_bytes(moment.terms, **setup) for moment in self.moments)
        restored = 0.0
        if recompute == "full" and self.checkpoint:
            restored = _bytes(self.kept, **setup) - _bytes(self.checkpoint, **setup)
        return max(peak, 0.0) + restored

    def memory_traffic_bytes(self, **setup: Unpack[CostSetup]) -> float:
        """Return roughly the bytes of device memory that one rank's forward reads and writes."""
        # The traffic terms of an embedding count the rows that it reads, not the whole table.
        tp = setup.get("tp", 1)
        held = self.parameters(tp) + self.frozen_parameters(tp)
        weights = 0 if self.kind == "embedding" else held
        return _bytes(self.traffic, **setup) + weights * FLOAT_BYTES[setup["precision"]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model to train: its layers in order and the few numbers that describe it."""

    name: str
    family: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_max: int
    # Learned positions limit sequences to sequence_max.
    learned_positions: bool
    tied: bool
    # ``None`` for a user's own layers, which only that user's code can compute.
    architecture: Architecture | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the model; a shared tensor counts once."""
        return self.stage_parameters(0, len(self.layers))

    def stage_parameters(self, first: int, end: int, *, tp: int = 1) -> int:
        """Return the parameters that one rank of a stage with these layers holds.

        A shared tensor counts once in each stage that has one of its layers.
        """
        held = self.layers[first:end]
        names = {layer.name for layer in held}
        shared = sum(
            tensor.rank_elements(tp)
            for layer in held
            for tensor in layer.tensors
            if tensor.tied_to is not None and tensor.tied_to.split("/")[0] in names
            if not tensor.frozen
        )
        return sum(layer.parameters(tp) for layer in held) - shared

    @property
    def is_vision(self) -> bool:
        """Whether its samples are images."""
        return self.architecture is not None and self.architecture.image > 0

    def tokens_of(self, sequence: int) -> int:
        """Return the tokens of a sample; an image has as many as the model cuts it into."""
        return self.sequence_max if self.is_vision else sequence

    @property
    def fingerprint(self) -> str:
        """A hash of the model: equal models have equal fingerprints."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def problems_with_tp(self, tp: int, *, place: str = "tp") -> tuple[Problem, ...]:
        """Return why ``tp`` ranks cannot share this model's layers; empty if they can."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            return (Problem(place, f"{tp!r} is not a TP degree", "give an integer of at least 1"),)
        if self.family == "module" and self.heads % tp:
            what = f"TP {tp} does not divide {self.heads}, the finest split found in {self.name}"
            return (Problem(place, what, _first_divisors(self.heads)),)
        found = [
            Problem(
                place,
                f"TP {tp} does not divide the {count} {what} of {self.name}",
                _first_divisors(count),
            )
            for what, count in (("attention heads", self.heads), ("FFN columns", self.ffn))
            if count % tp
        ]
        grouped = self.kv_heads != self.heads
        if grouped and self.kv_heads % tp and tp % self.kv_heads:
            cure = _first_divisors(
                self.heads, lambda n: self.kv_heads % n == 0 or n % self.kv_heads == 0
            )
            what = f"TP {tp} neither divides the {self.kv_heads} key/value heads of {self.name}"
            found.append(Problem(place, f"{what} nor is a multiple of them", cure))
        return tuple(found)

    def problems_with_sequence(
        self, sequence: int, *, place: str = "sequence"
    ) -> tuple[Problem, ...]:
        """Return why samples of ``sequence`` tokens cannot be trained; empty if they can."""
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1:
            return (
                Problem(place, f"{sequence!r} is not a length", "give an integer of at least 1"),
            )
        if self.learned_positions and sequence > self.sequence_max:
            what = f"{self.name} has learned positions for {self.sequence_max} tokens only"
            return (Problem(place, what, f"give at most {self.sequence_max}"),)
        return ()


def _first_divisors(number: int, also: Callable[[int], bool] = lambda _: True) -> str:
    shown = [str(n) for n in divisors(number) if also(n)][:8]
    return "choose from " + ", ".join(shown)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in rising order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
