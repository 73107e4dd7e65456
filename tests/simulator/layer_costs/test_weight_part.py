"""What the gradient of the weights takes of a backward, and keeps: counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.roofline import Roofline
from simulator.layer_costs.weight_part import kept_for_weights, products_share
from simulator.models.families import build_model
from simulator.models.layers import Layer
from simulator.network.curves import curve_from_bandwidths
from simulator.network.network import MeasuredNetwork, Network

CATALOGUE = load_catalogue()
HIDDEN, SEQUENCE = 1024, 512
GPT = build_model("gpt2", layers=2, hidden=HIDDEN, heads=16, vocab=1000, sequence=SEQUENCE)
LLAMA = build_model(
    "llama", layers=1, hidden=HIDDEN, heads=16, kv_heads=4, ffn=3000, vocab=1000, sequence=SEQUENCE
)

CURVES = {2: curve_from_bandwidths(1, sizes_bytes=(1e6, 1e9), bytes_per_s=(1e10, 1e11))}


def kept(layer: Layer, tp: int = 1) -> float:
    return kept_for_weights(
        layer, micro_batch=3, sequence=SEQUENCE, tp=tp, precision="bf16", flash=True
    )


def test_a_gpt_block_keeps_32_bytes_per_value_as_published() -> None:
    """Inputs of four products, h + h + h + 4h, and gradients of their outputs, 3h + h + 4h + h."""
    assert kept(GPT.layers[1]) == 3 * SEQUENCE * HIDDEN * 32


def test_tensor_parallelism_divides_what_it_splits() -> None:
    """The inputs of the products that are split by rows stay whole, as do outputs by columns."""
    halves = 3 + 1 + 4 + 4  # query, key, value, context, up, down's input
    wholes = 1 + 1 + 1 + 1  # both norms' outputs, and both outputs
    assert kept(GPT.layers[1], tp=2) == 3 * SEQUENCE * HIDDEN * 2 * (wholes + halves / 2)


def test_a_gate_has_the_input_of_its_product() -> None:
    values = (1024 + 1024 + 2 * 256) + (1024 + 1024) + (1024 + 2 * 3000) + (3000 + 1024)
    assert kept(LLAMA.layers[1]) == 3 * SEQUENCE * 2 * values


def test_an_embedding_is_all_weights_and_a_head_is_not_divided() -> None:
    embedding, head = GPT.layers[0], GPT.layers[-1]
    alone = embedding.kept_bytes(micro_batch=3, sequence=SEQUENCE, precision="bf16", flash=True)
    assert kept(embedding) == alone + 3 * SEQUENCE * HIDDEN * 2
    assert kept(head) == 0
    assert products_share(head, micro_batch=1, sequence=SEQUENCE, tp=1) == 0


def test_scores_have_no_weights() -> None:
    share = products_share(GPT.layers[1], micro_batch=3, sequence=SEQUENCE, tp=1)
    assert share == pytest.approx(12 * HIDDEN / (12 * HIDDEN + 2 * SEQUENCE))


def test_frozen_weights_have_no_gradient() -> None:
    block = GPT.layers[1]
    frozen = replace(block, tensors=tuple(replace(each, frozen=True) for each in block.tensors))
    assert kept(frozen) == 0
    assert products_share(frozen, micro_batch=3, sequence=SEQUENCE, tp=1) == 0


def test_all_reduces_and_other_traffic_are_not_divided() -> None:
    measured = MeasuredNetwork(within={"A100-40": CURVES})
    roofline = Roofline(
        GPT, SEQUENCE, "bf16", True, CATALOGUE, Network(catalogue=CATALOGUE, measured=measured)
    )
    for tp in (1, 2):
        share = roofline.weight_shares("A100-40", tp=tp, micro_batch=16)
        times = roofline.times("A100-40", tp=tp, micro_batch=16)
        demand = roofline.demand("A100-40", tp=tp, micro_batch=16)
        calibration = roofline.calibration("A100-40")
        products = demand.compute_s / calibration.compute_share
        weights = share * times.backward
        assert weights[1] == pytest.approx(products[1] * 12 * HIDDEN / (12 * HIDDEN + 2 * SEQUENCE))
        assert weights[0] == times.backward[0]
        assert weights[-1] == 0
        assert (weights <= times.backward).all()
        assert np.isfinite(share).all()
