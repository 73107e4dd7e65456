"""What the gradient of the weights takes of a layer's backward, and keeps until it is computed.

A schedule with a divided backward computes it apart (``simulator.estimate.pass_order``). Blocks
are divided by their matrices; an embedding's backward is nothing else. A head is not divided: the
gradients of its logits would be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from simulator.models.layers import FLOAT_BYTES, CostSetup, Layer, TensorSpec

INPUT_OF: Mapping[str, str] = {
    "attention.key.weight": "attention.query.weight",
    "attention.value.weight": "attention.query.weight",
    "mlp.gate.weight": "mlp.up.weight",
}
"""Matrices of our blocks that have the input of another one."""


def _matrices(layer: Layer) -> list[TensorSpec]:
    """Return the trained matrices of a block."""
    if layer.kind != "block":
        return []
    return [each for each in layer.tensors if len(each.shape) == 2 and not each.frozen]


def products_share(layer: Layer, *, micro_batch: int, sequence: int, tp: int) -> float:
    """Return the matrix products of the weights' gradient, relative to those of the forward."""
    flops = layer.forward_flops(micro_batch=micro_batch, sequence=sequence, tp=tp)
    if not flops:
        return 0.0
    each = sum(tensor.rank_elements(tp) for tensor in _matrices(layer))
    return min(2 * micro_batch * sequence * each / flops, 1.0)


def kept_for_weights(layer: Layer, **setup: Unpack[CostSetup]) -> float:
    """Return the bytes that one rank keeps between the two parts of a divided backward.

    For each matrix its input and the gradient of its output; other tensors are done by then.
    """
    tokens, tp = setup["micro_batch"] * setup["sequence"], setup.get("tp", 1)
    width = FLOAT_BYTES[setup["precision"]]
    if layer.kind == "embedding":
        return layer.kept_bytes(**setup) + float(width * tokens * layer.output_per_token)
    matrices = _matrices(layer)
    names = {each.name for each in matrices}
    values = 0
    for each in matrices:
        rows, columns = each.rank_shape(tp)
        is_shared = INPUT_OF.get(each.name) in names
        values += rows + (0 if is_shared else columns)
    return float(width * tokens * values)
