"""Builds a transformer block: its tensors, kept activations, FLOPs and memory traffic.

Kept activations follow what PyTorch's autograd saves, operation by operation;
``tests/simulator/models/test_models_torch.py`` compares them with PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from simulator.models.layers import Layer, PassPoint, TensorSpec, Term, When

Activation = Literal["gelu", "relu", "swiglu"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a framework's kernels keep for the backward pass, where frameworks differ."""

    # A norm keeps its input (PyTorch), only its output (Apex' memory-efficient norm, the default
    # of Megatron-DeepSpeed), or, composed of small operations, its input and the normalised
    # values in fp32 (PyTorch's RMSNorm on a CPU, norms written in Python).
    norm: Literal["input", "output", "composite"] = "input"
    # The loss allocates a gradient besides the kept log-probabilities (PyTorch) or overwrites
    # the kept probabilities (Megatron's vocabulary-parallel cross entropy).
    loss: Literal["torch", "in_place"] = "torch"
    # Eager attention scales, masks and normalises the scores in one kernel in 16-bit precision
    # (Megatron's fused softmax), or by operations of PyTorch: in the precision of training, or in
    # fp32 (Megatron without the fused kernel).
    softmax: Literal["torch", "fused", "fp32"] = "torch"
    # What dropout keeps is drawn by integer operations, each a kernel of its own (the worker's,
    # whose numbers depend on the sample alone), or within the kernel that applies it (Megatron).
    dropout: Literal["drawn apart", "fused"] = "drawn apart"


TORCH = Kernels()
MEGATRON = Kernels(norm="output", loss="in_place", softmax="fused", dropout="fused")


DRAWING_BYTES = 76
"""A third of the 227 bytes per element that the worker's dropout moves to draw its mask, since the
roofline takes three forward passes for both: filling in the index 4, hashing it 216 in 20
operations on 32 bits, comparing it 5, and reading the mask in each direction."""


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """The numbers that define a transformer, checked by ``simulator.models.families``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    activation: Activation
    rms_norm: bool
    norm_first: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    position_rows: int
    # Width of the token embedding; if it is not the hidden width, projections convert it.
    embedding_width: int
    tied: bool
    dropout: bool
    attention_dropout: bool
    kernels: Kernels
    image_values: int = 0
    patch_values: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def stats(self) -> int:
        """Values that a norm keeps per token: mean and inverse deviation, or only the latter."""
        return 1 if self.rms_norm or self.kernels.norm == "output" else 2


def norm_tensors(numbers: TransformerConfig, name: str) -> tuple[TensorSpec, ...]:
    """Return the parameters of one norm; an RMS norm has no bias."""
    weight = TensorSpec(f"{name}.weight", (numbers.hidden,))
    if numbers.rms_norm:
        return (weight,)
    return (weight, TensorSpec(f"{name}.bias", (numbers.hidden,)))


def _linear(
    name: str, rows: int, columns: int, *, split: int, ways: int, bias: bool
) -> tuple[TensorSpec, ...]:
    """Return a linear layer split by rows (0) or columns (1); the latter's bias is not split."""
    weight = TensorSpec(f"{name}.weight", (rows, columns), split, ways)
    of_bias = (0, ways) if split == 0 else ()
    return (weight, TensorSpec(f"{name}.bias", (rows,), *of_bias)) if bias else (weight,)


def _block_tensors(n: TransformerConfig) -> tuple[TensorSpec, ...]:
    h, q, kv, f = n.hidden, n.query_width, n.kv_width, n.ffn
    gate = (
        _linear("mlp.gate", f, h, split=0, ways=f, bias=n.mlp_bias)
        if n.activation == "swiglu"
        else ()
    )
    return (
        *norm_tensors(n, "attention.norm"),
        *_linear("attention.query", q, h, split=0, ways=n.heads, bias=n.qkv_bias),
        *_linear("attention.key", kv, h, split=0, ways=n.kv_heads, bias=n.qkv_bias),
        *_linear("attention.value", kv, h, split=0, ways=n.kv_heads, bias=n.qkv_bias),
        *_linear("attention.output", h, q, split=1, ways=n.heads, bias=n.output_bias),
        *norm_tensors(n, "mlp.norm"),
        *gate,
        *_linear("mlp.up", f, h, split=0, ways=f, bias=n.mlp_bias),
        *_linear("mlp.down", h, f, split=1, ways=f, bias=n.mlp_bias),
    )


def kept_by_norm(n: TransformerConfig, name: str) -> tuple[Term, ...]:
    """Return what a norm keeps besides its output."""
    stats = Term(f"{name} statistics", per_token=n.stats, item="fp32")
    match n.kernels.norm:
        case "input":
            return (Term(f"{name} input", per_token=n.hidden), stats)
        case "output":
            return (stats,)
        case "composite":
            parts = (f"{name} input", f"{name} normalised")
            return (*(Term(part, per_token=n.hidden, item="fp32") for part in parts), stats)


def _kept_by_attention(n: TransformerConfig) -> tuple[Term, ...]:
    q, kv, heads = n.query_width, n.kv_width, n.heads
    scores = [Term("probabilities", per_pair=heads, ways=heads, when="eager")]
    if n.attention_dropout:
        scores += [
            Term("probabilities after dropout", per_pair=heads, ways=heads, when="eager"),
            Term("probabilities mask", per_pair=heads, ways=heads, item="mask", when="eager"),
        ]
    return (
        Term("query", per_token=q, ways=heads),
        # Without flash attention, grouped keys and values are repeated for every head.
        Term("key and value", per_token=2 * q, ways=heads, when="eager"),
        Term("key and value", per_token=2 * kv, ways=n.kv_heads, when="flash"),
        *scores,
        Term("log-sum-exp", per_token=heads, ways=heads, item="fp32", when="flash"),
        # Flash attention's output is the input of the output projection: kept once.
        Term("context", per_token=q, ways=heads),
    )


def _kept_by_mlp(n: TransformerConfig) -> tuple[Term, ...]:
    # ReLU keeps its output, which the down projection keeps anyway; GELU keeps its input, and the
    # projection GELU's output; SwiGLU keeps gate, up, the activated gate and the product.
    columns = {"relu": 1, "gelu": 2, "swiglu": 4}[n.activation]
    return (Term("mlp activations", per_token=columns * n.ffn, ways=n.ffn),)


def _kept_by_block(n: TransformerConfig) -> tuple[Term, ...]:
    h = n.hidden
    masks = [Term(f"{part} mask", per_token=h, item="mask") for part in ("attention", "mlp")]
    # Norm first: input -> norm -> attention -> + -> norm -> MLP -> +.
    # Norm last: input -> attention -> + -> norm -> MLP -> + -> norm, where the last norm's output
    # is the input of the next layer.
    return (
        Term("attention input", per_token=h),
        *kept_by_norm(n, "attention norm"),
        *_kept_by_attention(n),
        Term("mlp input", per_token=h),
        *kept_by_norm(n, "mlp norm"),
        *_kept_by_mlp(n),
        *(masks if n.dropout else ()),
    )


def _negate(kept: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(
        replace(term, name=f"freed: {term.name}", per_token=-term.per_token) for term in kept
    )


def _block_moments(n: TransformerConfig) -> tuple[PassPoint, ...]:
    """Return the points of a block's passes at which memory can peak.

    Negative terms are kept tensors that are freed, or not made yet.
    """
    h, q, f, heads = n.hidden, n.query_width, n.ffn, n.heads
    skip = Term("gradient of the residual", per_token=h)
    masked = (Term("gradient before dropout", per_token=h),) if n.dropout else ()
    # SwiGLU: gradients of product, gate and up, less the freed product. ReLU: gradients of output
    # and input. GELU: the same, less its freed output.
    columns = {"relu": 2, "gelu": 1, "swiglu": 2}[n.activation]
    norm = kept_by_norm(n, "mlp norm")
    # With norm last, the norm's backward runs first and frees its tensors before the MLP's.
    at_mlp = () if n.norm_first else _negate(norm)
    at_attention = _negate(
        (
            *_kept_by_mlp(n),
            Term("mlp input", per_token=h),
            *norm,
            *(() if n.norm_first else kept_by_norm(n, "attention norm")),
            Term("context and value", per_token=2 * q, ways=heads),
        )
    )
    # Attention dropout frees its output before the gradient of its input is allocated.
    scores = 1 if n.attention_dropout else 2
    return (
        *_drawing_moments(n),
        PassPoint(
            "mlp down projection",
            (
                skip,
                *masked,
                *at_mlp,
                Term("gradient of the activation", per_token=f, ways=f),
                Term("gradient of the weight", fixed=f * h, ways=f),
            ),
        ),
        PassPoint(
            "mlp activation", (skip, *at_mlp, Term("gradients", per_token=columns * f, ways=f))
        ),
        PassPoint(
            "attention scores",
            (
                skip,
                Term("gradients of scores", per_pair=scores * heads, ways=heads, when="eager"),
                Term("gradient of the value", per_token=q, ways=heads),
                *at_attention,
            ),
        ),
    )


def _drawing_moments(n: TransformerConfig) -> tuple[PassPoint, ...]:
    """Return the moment of the forward pass at which the dropout of the scores is drawn.

    It holds two integers of 32 bits for each score beside the scores before the softmax; what a
    block keeps from then on is not there yet.
    """
    if not n.attention_dropout or n.kernels.dropout == "fused":
        return ()
    heads = n.heads
    return (
        PassPoint(
            "attention dropout",
            (
                Term("scores", per_pair=heads, ways=heads, when="eager"),
                Term("random numbers", per_pair=heads, ways=heads, item="index", when="eager"),
                Term("later: after dropout", per_pair=-heads, ways=heads, when="eager"),
                Term("later: mask", per_pair=-heads, ways=heads, item="mask", when="eager"),
                *_negate((Term("context", per_token=n.query_width, ways=n.heads),)),
                *_negate((Term("mlp input", per_token=n.hidden), *_kept_by_mlp(n))),
            ),
        ),
    )


def _block_flops(n: TransformerConfig) -> tuple[Term, ...]:
    h, q, kv, f = n.hidden, n.query_width, n.kv_width, n.ffn
    products = 3 if n.activation == "swiglu" else 2
    return (
        Term("query and output", per_token=2 * 2 * h * q, ways=n.heads),
        Term("key and value", per_token=2 * 2 * h * kv, ways=n.kv_heads),
        Term("scores and context", per_pair=2 * 2 * q, ways=n.heads),
        Term("mlp", per_token=2 * products * h * f, ways=f),
    )


def _block_traffic(n: TransformerConfig) -> tuple[Term, ...]:
    h, q, kv, f, heads = n.hidden, n.query_width, n.kv_width, n.ffn, n.heads
    # Inputs and outputs of the projections and of the activation between them.
    columns = {"relu": 4, "gelu": 4, "swiglu": 8}[n.activation]
    return (
        # Two norms (read, write), two residual additions (read two, write), inputs of three
        # groups of projections and outputs of two.
        Term("norms, residuals, products", per_token=15 * h),
        Term("query, context", per_token=6 * q, ways=heads),
        Term("key, value", per_token=4 * kv, ways=n.kv_heads),
        *_score_traffic(n),
        Term("mlp", per_token=columns * f, ways=f),
        *_drawing_traffic(n),
    )


def _score_traffic(n: TransformerConfig) -> tuple[Term, ...]:
    """Return the passes over the score matrix in the forward pass.

    Torch: write the product; read and write for scale, mask and softmax; read for the context.
    The fused softmax reads and writes once for all three. Without it, Megatron's 16-bit scores
    become fp32 for mask and softmax, and 16-bit again: 82 bytes per score in forward and backward
    with dropout, 64 without, of which a third is counted here. Dropout adds a read and a write.
    """

    def passes(count: int, when: When) -> Term:
        return Term("scores", per_pair=count * n.heads, ways=n.heads, when=when)

    dropout = 2 if n.attention_dropout else 0
    match n.kernels.softmax:
        case "torch":
            return (passes(8 + dropout, "eager"),)
        case "fused":
            return passes(8 + dropout, "eager fp32"), passes(4 + dropout, "eager 16-bit")
        case "fp32":
            return passes(8 + dropout, "eager fp32"), passes(11 + 3 * dropout // 2, "eager 16-bit")


def _drawing_traffic(n: TransformerConfig) -> tuple[Term, ...]:
    """Return what drawing the dropouts of the scores and of both residuals moves, in bytes."""
    if n.kernels.dropout == "fused":
        return ()
    scores, residuals = DRAWING_BYTES * n.heads, 2 * DRAWING_BYTES * n.hidden
    found = []
    if n.attention_dropout:
        name = "drawing of scores"
        found.append(Term(name, per_pair=scores, ways=n.heads, item="mask", when="eager"))
    if n.dropout:
        found.append(Term("drawing of residuals", per_token=residuals, item="mask"))
    return tuple(found)


def block(numbers: TransformerConfig, name: str) -> Layer:
    """Build one transformer block: attention and MLP, each with its norm and residual."""
    return Layer(
        name=name,
        kind="block",
        tensors=_block_tensors(numbers),
        flops=_block_flops(numbers),
        kept=_kept_by_block(numbers),
        checkpoint=(Term("input", per_token=numbers.hidden),),
        moments=_block_moments(numbers),
        traffic=_block_traffic(numbers),
        output_per_token=numbers.hidden,
        allreduces_forward=2,
        allreduces_backward=2,
        allreduce_per_token=numbers.hidden,
    )
