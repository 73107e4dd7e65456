"""Converts DeepSpeed's state to full tensors and back, so that a run can change engines.

If DeepSpeed shards masters and moments over replicas (ZeRO, bf16), each rank keeps a fragment of a
parameter's state in a flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simulator.spec.job import Job
from worker.layout.rank_layout import TIED
from worker.layout.tensor_table import tensors_of
from worker.models.apply_plan import LocalLayer
from worker.training.full_tensors import RankTensors, StateKind, TensorKey

_MOMENTS: Mapping[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""torch's names for our moments; other optimizers have none that we know."""


def pieces_of_engine(engine: Any, job: Job, layers: Sequence[LocalLayer]) -> RankTensors:
    """Copy the state of this rank's layers; a collective of all replicas."""
    found: RankTensors = {}
    for layer, name, atoms, parameter in _list_parameters(job, layers):
        place, kept = _kept_state(engine, parameter)
        for kind, values in kept.items():
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            whole[place] = values
            if hasattr(parameter, "_dp_group"):
                dist.all_reduce(whole, group=parameter._dp_group)
            found[layer, name, kind] = [(atoms, whole.view(parameter.shape).cpu())]
    return found


def load_engine(
    engine: Any,
    job: Job,
    layers: Sequence[LocalLayer],
    logical: Mapping[TensorKey, Tensor],
    *,
    updates: int,
) -> None:
    """Load full tensors, which any engine may have produced, into DeepSpeed."""
    with torch.no_grad():
        for layer, name, _, parameter in _list_parameters(job, layers):
            place, kept = _kept_state(engine, parameter)
            for kind, values in kept.items():
                values.copy_(logical[layer, name, kind].flatten()[place])
            parameter.copy_(logical[layer, name, "master"])
    for state in _torch_optimizer(engine).state.values():
        if "step" in state:
            state["step"].fill_(updates)


def _list_parameters(
    job: Job, layers: Sequence[LocalLayer]
) -> Iterator[tuple[int, str, range | None, nn.Parameter]]:
    """Yield each parameter with its layer, name and atoms."""
    shared = {spec.name for spec in tensors_of(job)[TIED]}
    for layer in layers:
        for tensor in layer.tensors:
            name = tensor.spec.tied_name or tensor.spec.name
            is_shared = name in shared and (tensor.spec.tied_name is not None or layer.index == 0)
            atoms = None if tensor.spec.split_dim is None else range(job.max_tp)
            yield TIED if is_shared else layer.index, name, atoms, tensor.parameter


def _kept_state(engine: Any, parameter: nn.Parameter) -> tuple[slice, dict[StateKind, Tensor]]:
    """Return the master and moments that this rank keeps, and which part of the parameter."""
    optimizer = _torch_optimizer(engine)
    flat: Tensor = parameter
    place, there = slice(0, parameter.numel()), slice(None)
    if hasattr(parameter, "_hp_mapping"):
        mapping: Any = parameter._hp_mapping
        if mapping is None:
            # Other ranks keep all of it; use a fragment of length 0.
            flat, place, there = optimizer.param_groups[0]["params"][0], slice(0, 0), slice(0, 0)
        else:
            flat = optimizer.param_groups[mapping.param_group_index]["params"][0]
            place = _slice(mapping.lp_fragment_address)
            there = _slice(mapping.hp_fragment_address)
    found = {"master": flat.detach().flatten()[there]}
    for number, name in enumerate(_MOMENTS.get(type(optimizer), ())):
        state = optimizer.state[flat]
        if state.get(name) is None:
            # No step has run yet, so the moments are zero.
            state[name] = torch.zeros_like(flat, requires_grad=False)
            state.setdefault("step", torch.zeros(()))
        found[f"moment {number}"] = state[name].flatten()[there]
    return place, found


def _slice(address: Any) -> slice:
    return slice(address.start, address.start + address.numel)


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer, which ZeRO and 16-bit precision wrap."""
    optimizer: Any = engine.optimizer
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
