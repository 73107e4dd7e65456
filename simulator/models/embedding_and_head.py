"""Builds the first and last layers: embeddings and heads for language and vision models."""

from __future__ import annotations

from simulator.models.layers import Layer, PassPoint, TensorSpec, Term
from simulator.models.transformer_block import TransformerConfig, kept_by_norm, norm_tensors

EMBEDDING = "embedding"
HEAD = "head"
_TABLE = "token.weight"


def _dropout_mask(n: TransformerConfig) -> tuple[Term, ...]:
    return (Term("mask", per_token=n.hidden, item="mask"),) if n.dropout else ()


def token_embedding(n: TransformerConfig) -> Layer:
    """Build the token embedding, its table split by rows."""
    h, width, projected = n.hidden, n.embedding_width, n.embedding_width != n.hidden
    tensors = [TensorSpec(_TABLE, (n.vocab, width), 0, n.vocab)]
    kept = [Term("token ids", per_token=1, item="index")]
    flops = []
    if projected:
        tensors.append(TensorSpec("projection.weight", (h, width)))
        kept.append(Term("projection input", per_token=width))
        flops.append(Term("projection", per_token=2 * width * h))
    if n.position_rows:
        tensors.append(TensorSpec("position.weight", (n.position_rows, h)))
    # PyTorch's gradient of an embedding table is dense: it has all rows.
    lookup = (
        Term("gradient of the output", per_token=width),
        Term("gradient of the table", fixed=n.vocab * width, ways=n.vocab),
    )
    positions = (
        Term("gradient of the output", per_token=h),
        Term("gradient of the table", fixed=n.position_rows * h),
    )
    return Layer(
        name=EMBEDDING,
        kind="embedding",
        tensors=tuple(tensors),
        flops=tuple(flops),
        kept=(*kept, *_dropout_mask(n)),
        checkpoint=(),
        moments=(PassPoint("lookup", lookup), PassPoint("positions", positions)),
        # Read and write the row; read positions, read and write the sum.
        traffic=(Term("rows", per_token=2 * width + 3 * h),),
        output_per_token=h,
        allreduces_forward=1,
        allreduces_backward=0,
        allreduce_per_token=width,
    )


def language_head(n: TransformerConfig) -> Layer:
    """Build the final norm, the vocabulary projection and the loss."""
    h, width, projected = n.hidden, n.embedding_width, n.embedding_width != n.hidden
    tensors: list[TensorSpec] = []
    kept: list[Term] = []
    if n.norm_first:
        tensors += norm_tensors(n, "norm")
        kept += kept_by_norm(n, "norm")
    if projected:
        tensors.append(TensorSpec("narrowing.weight", (width, h)))
        kept.append(Term("narrowing input", per_token=h))
    tied_to = f"{EMBEDDING}/{_TABLE}" if n.tied else None
    tensors.append(TensorSpec("projection.weight", (n.vocab, width), 0, n.vocab, tied_to))
    vocabulary = Term("log-probabilities", per_token=n.vocab, ways=n.vocab, item="fp32")
    flops = [Term("projection", per_token=2 * width * n.vocab, ways=n.vocab)]
    if projected:
        flops.append(Term("narrowing", per_token=2 * width * h))
    return Layer(
        name=HEAD,
        kind="head",
        tensors=tuple(tensors),
        flops=tuple(flops),
        kept=(
            *kept,
            Term("projection input", per_token=width),
            vocabulary,
            Term("targets", per_token=1, item="index"),
        ),
        checkpoint=(),
        moments=_loss_moments(n),
        # The projection writes logits; the loss reads and writes them in fp32.
        traffic=(
            Term("norm and projection", per_token=3 * h + width),
            Term("logits", per_token=n.vocab, ways=n.vocab),
            Term("loss", per_token=3 * n.vocab, ways=n.vocab, item="fp32"),
        ),
        output_per_token=0,
        allreduces_forward=0,
        allreduces_backward=1,
        allreduce_per_token=width,
    )


def _loss_moments(n: TransformerConfig) -> tuple[PassPoint, ...]:
    width, vocab = n.embedding_width, n.vocab
    projection = (
        Term("gradient of the input", per_token=width),
        Term("gradient of the weight", fixed=vocab * width, ways=vocab),
    )
    if n.kernels.loss == "in_place":
        return (
            PassPoint("loss", (Term("logits", per_token=vocab, ways=vocab),)),
            PassPoint("projection", projection),
        )
    # PyTorch allocates gradients of log-probabilities and logits in fp32, and frees the
    # log-probabilities before the projection's backward.
    logits = Term("gradients of logits", per_token=2 * vocab, ways=vocab, item="fp32")
    cast = Term("gradient of logits", per_token=vocab, ways=vocab)
    freed = Term("freed: log-probabilities", per_token=-vocab, ways=vocab, item="fp32")
    return (PassPoint("loss", (logits,)), PassPoint("projection", (cast, freed, *projection)))


def patch_embedding(n: TransformerConfig) -> Layer:
    """Build the patch embedding of images, which tensor parallelism does not split."""
    h, patches = n.hidden, n.position_rows - 1
    tensors = (
        TensorSpec("patch.weight", (h, n.patch_values)),
        TensorSpec("patch.bias", (h,)),
        TensorSpec("class_token", (h,)),
        TensorSpec("position.weight", (n.position_rows, h)),
    )
    return Layer(
        name=EMBEDDING,
        kind="embedding",
        tensors=tensors,
        flops=(Term("patches", per_sample=2 * patches * n.patch_values * h),),
        kept=(Term("images", per_sample=n.image_values), *_dropout_mask(n)),
        checkpoint=(),
        moments=(
            PassPoint(
                "patches",
                (
                    Term("gradients of the output", per_token=2 * h),
                    Term("gradient of the weight", fixed=n.patch_values * h),
                ),
            ),
        ),
        traffic=(
            Term("images", per_sample=n.image_values),
            # Write patches, concatenate the class token, add positions.
            Term("tokens", per_token=6 * h),
        ),
        output_per_token=h,
        allreduces_forward=0,
        allreduces_backward=0,
        allreduce_per_token=0,
    )


def class_head(n: TransformerConfig) -> Layer:
    """Build the final norm and the classifier on the first token; neither is split."""
    h, classes = n.hidden, n.vocab
    return Layer(
        name=HEAD,
        kind="head",
        tensors=(
            *norm_tensors(n, "norm"),
            TensorSpec("projection.weight", (classes, h)),
            TensorSpec("projection.bias", (classes,)),
        ),
        flops=(Term("projection", per_sample=2 * h * classes),),
        kept=(
            *kept_by_norm(n, "norm"),
            # The classifier reads one token of the norm's output, which keeps all of it alive.
            Term("norm output", per_token=h),
            Term("log-probabilities", per_sample=classes, item="fp32"),
            Term("targets", per_sample=1, item="index"),
        ),
        checkpoint=(),
        moments=(
            PassPoint(
                "norm",
                (
                    # Gradients of the norm's output (zero except for the first token) and input.
                    Term("gradients", per_sample=h, per_token=2 * h),
                    Term("gradients of the norm", fixed=2 * h),
                    Term("freed: norm output", per_token=-h),
                    Term("freed: log-probabilities", per_sample=-classes, item="fp32"),
                ),
            ),
        ),
        traffic=(Term("norm", per_token=2 * h), Term("logits", per_sample=5 * classes)),
        output_per_token=0,
        allreduces_forward=0,
        allreduces_backward=0,
        allreduce_per_token=0,
    )
