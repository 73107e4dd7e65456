"""Ranks that train with either engine, continuing from either one's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.data.sources.open_data import open_data
from worker.distributed.process_groups import ProcessTransport
from worker.engines.deepspeed.config import read_config
from worker.engines.deepspeed.engine import DeepSpeedTrainer
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import TensorKey, merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer, TrainingProgress

State = tuple[dict[TensorKey, Any], TrainingProgress]


def train(
    rank: int, _: int, store: FileStore, engine: str, job: Job, plan: Plan, steps: int, begin: State
) -> Any:
    """Train some steps; return the losses and the rank's state as arrays."""
    data = open_data(job, Path())
    trainer: Any
    if engine == "sailor":
        transport = ProcessTransport(store, rank, plan.device_count)
        trainer = RankTrainer(job, plan, rank, transport, data)
    else:
        config = read_config(None, plan, job)
        device = torch.device("cpu")
        trainer = DeepSpeedTrainer(
            job, plan, rank, store, data, config, device=device, deadline_s=60, weights=None
        )
    if begin is not None:
        logical, progress = begin
        trainer.restore({key: torch.from_numpy(array) for key, array in logical.items()}, progress)
    losses = [trainer.step().loss for _ in range(steps)]
    pieces = (
        rank_tensors(trainer.buffers.values()) if engine == "sailor" else trainer.rank_tensors()
    )
    (transport if engine == "sailor" else trainer).close()
    arrays = {key: [(atoms, t.numpy()) for atoms, t in held] for key, held in pieces.items()}
    return losses, arrays, trainer.progress


def state_of(job: Job, results: list[Any]) -> State:
    """Merge the state of all ranks."""
    shares = [
        {key: [(atoms, torch.from_numpy(a)) for atoms, a in held] for key, held in arrays.items()}
        for _, arrays, _ in results
    ]
    merged = merge_ranks(shares, tensors_of(job))
    return {key: tensor.numpy() for key, tensor in merged.items()}, results[0][2]
