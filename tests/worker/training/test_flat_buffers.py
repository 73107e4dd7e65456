"""The flat buffers of a rank's layers."""

from __future__ import annotations

import pytest
import torch

from tests.worker.training_runs import alone, small_job
from worker.checkpoint.load_state import bit_sums
from worker.checkpoint.placement import state_shape
from worker.layout.rank_layout import TIED
from worker.layout.tensor_table import holdings_for
from worker.models.apply_plan import build_layers
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.training.flat_buffers import layer_buffers
from worker.training.precision import formats_of
from worker.training.zero1 import owned_buckets


def buffers_on(device: torch.device, *, frozen: bool):
    """Return the buffers of a tied job; ``frozen``: no layer has anything to train."""
    job = small_job("llama", tied=True)
    holdings = holdings_for(alone(job), job)
    layers = build_layers(
        job, range(5), context=MicroBatchContext(), dtype=torch.float32, device=device
    )
    tables = holdings.tables
    if frozen:
        for layer in layers:
            layer.tensors = ()
        tables = dict.fromkeys(tables, ())
    found = layer_buffers(
        layers,
        tables,
        atoms=job.max_tp,
        held=range(job.max_tp),
        precision=formats_of(job),
        moments=2,
        owned=owned_buckets(holdings, 0, zero=0),
        device=device,
    )
    return job, found


@pytest.mark.parametrize("frozen", [False, True])
def test_buffers_without_a_tensor_are_on_the_ranks_device(frozen: bool) -> None:
    meta = torch.device("meta")
    job, buffers = buffers_on(meta, frozen=frozen)
    assert buffers[0].master.numel() == 0, "the tied weight of layer 0 is in a buffer of its own"
    assert (TIED in buffers) is not frozen
    for buffer in buffers.values():
        states = (buffer.master, buffer.compute, buffer.gradient, *buffer.moments)
        assert {each.device for each in states} == {meta}
    keys, sums = bit_sums(buffers, state_shape(job), zero=0)
    assert sums is not None
    assert (sums.device, len(sums)) == (meta, len(keys))
