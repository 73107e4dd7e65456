"""Initial weights: each element is a function of seed, layer, tensor and position.

So a rank makes just its own shard, and every plan starts from the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.spec.job import Job
from worker.layout.shards import shard_of
from worker.models.random_numbers.counter_rng import approx_normal, stream_key
from worker.types import LogicalTensor

# Rows are made in chunks of about this many elements. On a CPU a chunk stays in a core's cache. On
# a GPU it takes longer to compute than to launch, and half a gigabyte beside the weights.
_CHUNK, _CHUNK_ON_GPU = 2**18, 2**24
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
    """Make the initial values of the shard that a rank with these atoms holds."""
    owner, name = (0, spec.tied_name) if spec.tied_name is not None else (index, spec.name)
    shard = shard_of(spec, atoms, of=job.max_tp)
    out = torch.empty(len(shard.rows), len(shard.columns), dtype=dtype, device=device)
    constant = _constant(name)
    if constant is not None:
        return out.fill_(constant).view(shard.shape)
    key = stream_key("weights", job.data.seed, owner, name)
    spread = _deviation(job, name)
    columns = torch.arange(shard.columns.start, shard.columns.stop, device=device)
    chunk = _CHUNK_ON_GPU if columns.is_cuda else _CHUNK
    step = max(1, chunk // max(1, len(columns)))
    for start in range(0, len(shard.rows), step):
        rows = shard.rows[start : start + step]
        places = torch.arange(rows.start, rows.stop, device=device)[:, None] * shard.width + columns
        values = approx_normal(places.to(torch.int32), key, spread=spread, dtype=dtype)
        out[start : start + len(rows)] = values
    true = {t.name: t.shape for t in job.model.layers[index].tensors}[spec.name]
    if true[0] < spec.shape[0]:  # Rows that pad a vocabulary are 0, and stay so.
        out[max(0, true[0] - shard.rows.start) :] = 0
    return out.view(shard.shape)


def _constant(name: str) -> float | None:
    """Return 1 for norm weights and 0 for biases; ``None``: random."""
    if name.endswith("bias"):
        return 0.0
    return 1.0 if name.endswith("norm.weight") else None


def _deviation(job: Job, name: str) -> float:
    """Return the standard deviation, as in GPT-2: smaller before the residual in deeper models."""
    residual = name in ("attention.output.weight", "mlp.down.weight")
    blocks = len(job.model.layers) - 2
    # The exact model has no norms, so its weights must be large enough for the fixed-point grid.
    deviation = 0.25 if job.model.family == "exact" else _STANDARD_DEVIATION
    return deviation / (2 * blocks) ** 0.5 if residual else deviation
