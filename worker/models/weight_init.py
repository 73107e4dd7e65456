"""Initial weights: each element a function of (seed, layer, tensor, place in the whole tensor).

So a rank makes the shard that it holds, and any plan starts from the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.spec.job import Job
from worker.layout.shards import Shard, shard_of
from worker.models.counter_rng import approx_normal, stream_key
from worker.types import LogicalTensor

# Rows are made in portions of about this many elements, so that a large table needs little more
# memory than itself, and a core's cache holds what is worked on.
_PORTION = 2**18
_STANDARD_DEVIATION = 0.02


def initial_shard(
    job: Job,
    index: int,
    spec: LogicalTensor,
    atoms: range,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Make the initial values of what a rank with these atoms holds of one tensor."""
    owner, name = (0, spec.tied_name) if spec.tied_name is not None else (index, spec.name)
    shard = shard_of(spec, atoms, of=job.max_tp)
    out = torch.empty(len(shard.rows), len(shard.columns), dtype=dtype, device=device)
    constant = _constant(name)
    if constant is not None:
        return out.fill_(constant).view(shard.shape)
    key = stream_key("weights", job.data.seed, owner, name)
    spread = _spread(job, name)
    columns = torch.arange(shard.columns.start, shard.columns.stop, device=device)
    step = max(1, _PORTION // max(1, len(columns)))
    for start in range(0, len(shard.rows), step):
        rows = shard.rows[start : start + step]
        places = torch.arange(rows.start, rows.stop, device=device)[:, None] * shard.width + columns
        values = approx_normal(places.to(torch.int32), key, spread=spread, dtype=dtype)
        out[start : start + len(rows)] = values
    _clear_padding(job, index, spec, shard, out)
    return out.view(shard.shape)


def _clear_padding(job: Job, index: int, spec: LogicalTensor, shard: Shard, out: Tensor) -> None:
    """Rows that pad a vocabulary stand for no token: they are 0 and stay 0."""
    true = {t.name: t.shape for t in job.model.layers[index].tensors}[spec.name]
    if true[0] < spec.shape[0]:
        out[max(0, true[0] - shard.rows.start) :] = 0


def _constant(name: str) -> float | None:
    """Norms begin as the identity and biases at 0."""
    if name.endswith("bias"):
        return 0.0
    return 1.0 if name.endswith("norm.weight") else None


def _spread(job: Job, name: str) -> float:
    """All weights begin as in GPT-2: what is added to the residual, smaller in deeper models."""
    residual = name in ("attention.output.weight", "mlp.down.weight")
    blocks = len(job.model.layers) - 2
    # Fixed-point numbers must be large enough to be seen, where no norm makes them so.
    deviation = 0.25 if job.model.family == "exact" else _STANDARD_DEVIATION
    return deviation / (2 * blocks) ** 0.5 if residual else deviation
