"""Describes a user's module as the simulator's ``Model``: its layers, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.models.layers import Item, Layer, LayerKind, Model, PassPoint, TensorSpec, Term
from worker.data.batch_tree import leaves_of, map_tensors
from worker.models.random_numbers.microbatch_context import batch_on_device
from worker.models.user_module.cut_module import CutModule, to_meta
from worker.models.user_module.module_cut import ModuleCut, kinds_of
from worker.models.user_module.module_skeleton import move_skeleton
from worker.models.user_module.module_splits import ModuleSplits
from worker.models.user_module.trace_costs import PassCosts, pass_costs

_Costs = tuple[PassCosts, PassCosts]
"""The costs of a layer in full, and as one of the most ranks that may share it."""
_ITEM_OF_BYTES: dict[int, Item] = {4: "fp32", 1: "mask", 8: "index"}


def describe_module(
    module: CutModule,
    name: str,
    make_batch: Callable[[int], Any],
    losses: Callable[[Any, Any], Tensor],
    *,
    is_trained: Callable[[str], bool],
    splits: ModuleSplits,
    dtype: torch.dtype,
) -> Model:
    """Describe a module by tracing batches of one and of two samples.

    Costs are counted for samples as long as those of the batch: the job's ``sequence`` is 1.
    """
    move_skeleton(module.module, device="cpu", dtype=dtype)
    batches = (
        batch_on_device(make_batch(size), of_module=True, dtype=dtype, device=torch.device("cpu"))
        for size in (1, 2)
    )
    one, two = (
        list(_trace_layers(module, batch, losses, is_trained, splits, dtype)) for batch in batches
    )
    _refuse_cut_off(module.cut, one, is_trained)
    tensors = _tensors(module, is_trained, splits)
    layers = [
        _layer(module.cut, index, tensors[index], first, second, splits, dtype)
        for index, (first, second) in enumerate(zip(one, two, strict=True))
    ]
    # The pass before the blocks is traced without gradients; those of its tables are dense.
    layers[0] = replace(layers[0], moments=(PassPoint("backward", (_gradients(tensors[0]),)),))
    return Model(
        name=name,
        family="module",
        layers=tuple(layers),
        hidden=layers[0].output_per_token,
        heads=splits.max_tp,
        kv_heads=splits.max_tp,
        ffn=splits.max_tp,
        vocab=1,
        sequence_max=1,
        learned_positions=False,
        tied=bool(module.cut.alias_of),
    )


def _refuse_cut_off(
    cut: ModuleCut, costs: Sequence[_Costs], is_trained: Callable[[str], bool]
) -> None:
    """Refuse to train layers in front of one that hands no gradient to its input."""
    found = (index for index, (whole, _) in enumerate(costs) if index and not whole.has_gradient)
    last = max(found, default=0)
    for name, layer in cut.layer_of.items():
        if layer < last and is_trained(name):
            what = f"{cut.layer_name(last)} hands no gradient to what is in front of it, and {name}"
            cure = "freeze it (requires_grad_(False)), or leave out detach() and the like"
            raise InputError(Problem("model", f"{what} is to be trained", cure))


def _gradients(tensors: Sequence[TensorSpec]) -> Term:
    elements = sum(math.prod(each.shape) for each in tensors if not each.frozen)
    return Term("gradients of the weights", fixed=elements)


def _tensors(
    module: CutModule, is_trained: Callable[[str], bool], splits: ModuleSplits
) -> list[tuple[TensorSpec, ...]]:
    """Return the parameters of each layer."""
    cut = module.cut
    found: list[list[TensorSpec]] = [[] for _ in range(cut.layers)]
    for name, layer in cut.layer_of.items():
        shape = tuple(module.module.get_parameter(name).shape)
        split = splits.of_parameter(name)
        found[layer].append(
            TensorSpec(cut.local_name(name), shape, *split, frozen=not is_trained(name))
        )
    for alias, owner in cut.alias_of.items():
        if not cut.is_shared_with_head(alias):
            continue
        shape = tuple(module.module.get_parameter(alias).shape)
        tied_to = f"{cut.layer_name(0)}/{owner}"
        found[-1].append(TensorSpec(alias, shape, tied_to=tied_to, frozen=not is_trained(owner)))
    return [tuple(each) for each in found]


def _trace_layers(
    module: CutModule,
    batch: Any,
    losses: Callable[[Any, Any], Tensor],
    is_trained: Callable[[str], bool],
    splits: ModuleSplits,
    dtype: torch.dtype,
) -> Iterator[_Costs]:
    """Trace every layer for one batch: in full, and as one of the most ranks that may share it."""
    arguments = module.arguments(batch)
    given = [each for each in leaves_of((batch, arguments.rest)) if isinstance(each, Tensor)]
    given += [*module.module.parameters(), *module.module.buffers()]
    hidden = torch.empty(arguments.hidden_shape, dtype=dtype, device="meta")
    found = pass_costs(lambda _: module.embed(batch), torch.empty(0), given=given)
    yield found, found
    shape_of = splits.rank_shape_in(module, splits.max_tp)
    kinds = kinds_of(module.module, module.cut.blocks)
    devices: list[str] = []
    known: dict[int, _Costs] = {}
    for index in range(len(module.cut.blocks)):
        if not devices or kinds[index] == index:
            devices.append(module.device_to_trace(index, arguments, dtype))
        else:
            devices.append(devices[kinds[index]])
        device, like = devices[index], known.get(kinds[index])
        if device == "cpu" and like is not None:
            # Real numbers take time: equal blocks are computed once.
            yield like
            continue
        hidden = torch.zeros(hidden.shape, dtype=dtype, device=device)
        trace = partial(module.traced_block, index, arguments, device=device, is_trained=is_trained)
        found = share = pass_costs(trace(), hidden, given=given)
        if splits.max_tp > 1:
            share = pass_costs(trace(shape_of), hidden, given=given)
        known[index] = found, share
        yield found, share
        hidden = torch.empty(found.output, dtype=dtype, device="meta")
    found = _head_costs(module, batch, losses, is_trained, hidden, given)
    yield found, found


def _head_costs(
    module: CutModule,
    batch: Any,
    losses: Callable[[Any, Any], Tensor],
    is_trained: Callable[[str], bool],
    hidden: Tensor,
    given: list[Tensor],
) -> PassCosts:
    """Trace head and loss on the meta device; code that needs real numbers is run with zeros."""
    try:
        with module.head_on_meta(is_trained):
            all_given = [*given, *module.module.parameters()]
            on_meta = map_tensors(to_meta, batch)
            return pass_costs(
                lambda x: losses(module.head(x, batch), on_meta), hidden, given=all_given
            )
    except (RuntimeError, NotImplementedError):
        zeros = torch.zeros(hidden.shape, dtype=hidden.dtype)
        return pass_costs(lambda x: losses(module.head(x, batch), batch), zeros, given=given)


def _layer(
    cut: ModuleCut,
    index: int,
    tensors: tuple[TensorSpec, ...],
    one: _Costs,
    two: _Costs,
    splits: ModuleSplits,
    dtype: torch.dtype,
) -> Layer:
    def terms(name: str, get: Callable[[PassCosts], int], item: Item = "float") -> Sequence[Term]:
        return _terms(name, [tuple(map(get, costs)) for costs in (one, two)], splits.max_tp, item)

    is_block = 0 < index < cut.layers - 1
    kind: LayerKind = "block" if is_block else "head" if index else "embedding"
    types = sorted({*one[0].kept, *two[0].kept}, key=str)
    kept = [
        terms(f"kept {each}".replace("torch.", ""), _kept_of(each), _item(each, dtype))
        for each in types
    ]
    elements = math.prod(two[0].output) - math.prod(one[0].output)
    # Columns that take the same tensor share one sum of its gradient; each such group ends in rows.
    sums = _rows_in(splits, cut.blocks[index - 1]) if is_block else 0
    return Layer(
        name=cut.layer_name(index),
        kind=kind,
        tensors=tensors,
        flops=tuple(terms("products", lambda costs: costs.flops)),
        kept=tuple(term for each in kept for term in each),
        checkpoint=tuple(terms("input", lambda costs: costs.input)) if is_block else (),
        moments=(
            PassPoint(
                "backward", tuple(terms("peak", lambda costs: costs.transient_bytes, "mask"))
            ),
        ),
        traffic=tuple(terms("traffic", lambda costs: costs.traffic)),
        output_per_token=elements,
        allreduces_forward=sums,
        allreduces_backward=sums,
        allreduce_per_token=elements if sums else 0,
    )


def _terms(name: str, counts: Sequence[Sequence[int]], most: int, item: Item) -> list[Term]:
    """Split counts for one and two samples into a fixed part and one per sample.

    Each is split again into what every rank has in full, and what ``most`` ranks share.
    """
    shared = [(whole - part) * most // (most - 1) if most > 1 else 0 for whole, part in counts]
    in_full = [whole - divided for (whole, _), divided in zip(counts, shared, strict=True)]
    return [
        Term(name, max(2 * one - two, 0), per_sample=max(two - one, 0), ways=ways, item=item)
        for (one, two), ways in ((in_full, 1), (shared, most))
        if two > 0 or ways == 1
    ]


def _rows_in(splits: ModuleSplits, block: str) -> int:
    return sum(
        path.startswith(f"{block}.") and kind == "rows" for path, kind in splits.kinds.items()
    )


def _kept_of(dtype: torch.dtype) -> Callable[[PassCosts], int]:
    return lambda costs: costs.kept.get(dtype, 0)


def _item(kept: torch.dtype, computed: torch.dtype) -> Item:
    return "float" if kept == computed else _ITEM_OF_BYTES.get(kept.itemsize, "fp32")
