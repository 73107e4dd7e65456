"""Tries the splits that a block's class declares by numbers, before any rank starts.

The ranks of a stage group are threads here: each computes its share of one block in fp64, forward
and backward, and all results are compared with those of the whole block.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.distributed.interface import Collective, PendingOperation, Reduction
from worker.layout.split_spec import splits_of
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.models.user_module.cut_module import BlockArguments, CutModule
from worker.models.user_module.module_cut import kinds_of
from worker.models.user_module.module_layers import ModuleSource, build_module_layers
from worker.types import LogicalTensor

_TOLERANCE = 1e-5
"""Relative to the largest value. Code that computes in fp32 inside is no mistake; a wrong split
is."""
_PRODUCTS_MAX = 2 * 10**10
"""Larger blocks, in parameters times tokens, would take more than some seconds."""
_WAIT_S = 60.0


def check_splits(source: ModuleSource, job: Job, batch: Any) -> list[str]:
    """Compare shared blocks with whole ones; return the names of blocks that cannot be tried:
    too large ones, and those that compute no numbers with random weights.

    ``batch`` is one sample. ``InputError`` names a block whose ranks compute something else.
    """
    skeleton, cut = source.skeleton(), source.cut
    if job.max_tp < 2:
        return []
    arguments = CutModule(skeleton, cut, source.call).arguments(batch)
    tokens = arguments.hidden_shape[:-1].numel()
    skipped = []
    for number in sorted(set(kinds_of(skeleton, cut.blocks))):
        path = cut.blocks[number]
        block = skeleton.get_submodule(path)
        if not splits_of(block):
            continue
        if sum(each.numel() for each in block.parameters()) * tokens > _PRODUCTS_MAX:
            skipped.append(path)
            continue
        trial = _Trial(cast("ModuleSource", _Drawn(source)), job, number + 1, arguments, batch)
        whole = trial.computed(1)[0]
        if not torch.isfinite(whole.out).all():
            skipped.append(path)  # Random weights are not what it was made for.
            continue
        for tp in sorted({2, job.max_tp}):
            for what in _differences(whole, trial.computed(tp)):
                split = ", ".join(splits_of(block))
                cure = f"correct splits of {type(block).__name__}, or give max_tp=1"
                text = f"computes another {what} when {tp} ranks share {split}"
                raise InputError(Problem(f"model: {path}", text, cure))
    return skipped


class _Drawn:
    """The same module with random weights; initial ones may be zero and hide mistakes."""

    def __init__(self, source: ModuleSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def value(self, name: str) -> Tensor:
        """Return random numbers that depend on the name alone."""
        shape = self._source.value(name).shape
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        width = shape[1:].numel() if len(shape) > 1 else 1
        found: Tensor = torch.randn(shape, generator=draw, dtype=torch.float64) / width**0.5
        return found


@dataclass(frozen=True, slots=True)
class _Computed:
    """What one rank has computed: the result, and the gradients of input and parameters."""

    out: Tensor
    of_input: Tensor
    of_parameters: list[tuple[LogicalTensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class _Trial:
    """One pass through one block, by any number of ranks."""

    source: ModuleSource
    job: Job
    index: int
    arguments: BlockArguments
    batch: Any

    def computed(self, ranks: int) -> list[_Computed]:
        """Let this many ranks share the block."""
        if ranks == 1:
            return [self._compute_rank(1, 0, None)]
        world = _World(ranks)
        return world.run(lambda rank: self._compute_rank(ranks, rank, _Member(world, rank)))

    def _compute_rank(self, tp: int, rank: int, group: Collective | None) -> _Computed:
        context = MicroBatchContext()
        (layer,) = build_module_layers(
            self.source, self.job, [self.index], tp=tp, tp_index=rank, group=group,
            context=context, master=torch.float64, compute=torch.float64, device="cpu",
        )  # fmt: skip
        current = MicroBatch(0, 0, torch.tensor([0]), inputs=self.batch)
        shape = self.arguments.hidden_shape
        current.block_arguments = BlockArguments(tree_map(_to_fp64, self.arguments.rest), shape)
        context.current = current
        draw = torch.Generator().manual_seed(1)
        hidden, cotangent = torch.randn(2, *shape, generator=draw, dtype=torch.float64)
        hidden.requires_grad_()
        out = layer(hidden)
        out.backward(cotangent)  # type: ignore[no-untyped-call]  # torch does not type it
        assert hidden.grad is not None, "a block computes with its input"
        gradients = [(each.spec, each.parameter.grad) for each in layer.tensors]
        return _Computed(out.detach(), hidden.grad, gradients)


def _to_fp64(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _differences(whole: _Computed, shares: list[_Computed]) -> Iterator[str]:
    """Name everything that ranks compute otherwise than one rank alone."""
    for share in shares:
        if _differ(whole.out, share.out):
            yield "result"
        if _differ(whole.of_input, share.of_input):
            yield "gradient of its input"
    for number, (spec, expected) in enumerate(whole.of_parameters):
        found = [share.of_parameters[number][1] for share in shares]
        if _gradients_differ(spec, expected, found):
            yield f"gradient of {spec.name}"


def _gradients_differ(
    spec: LogicalTensor, expected: Tensor | None, found: list[Tensor | None]
) -> bool:
    given = [each for each in found if each is not None]
    if expected is None or len(given) < len(found):
        return not (expected is None and not given)
    if spec.split_dim is not None:
        return _differ(expected, torch.cat(given, spec.split_dim))
    if spec.gradient == "partial":
        return _differ(expected, torch.stack(given).sum(0))
    return any(_differ(expected, each) for each in given)


def _differ(one: Tensor, other: Tensor) -> bool:
    scale = float(one.abs().max()) if one.numel() else 0.0
    # Written so that a result that is not a number differs, too.
    return bool(one.numel()) and not float((one - other).abs().max()) <= _TOLERANCE * scale


class _World:
    """Threads of this process that sum tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=_WAIT_S)

    def run(self, body: Callable[[int], _Computed]) -> list[_Computed]:
        """Run all ranks; raise the first error of one."""
        results: dict[int, _Computed] = {}
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            try:
                results[number] = body(number)
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert len(results) == self.size, "ranks of equal code sum equally often"
        return [results[number] for number in range(self.size)]


class _Member(Collective):
    """One thread as a rank."""

    def __init__(self, world: _World, index: int) -> None:
        self._world, self.index, self.size = world, index, world.size

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Sum over all ranks in place."""
        assert op == "sum", "blocks only sum"
        world = self._world
        world.parts[self.index] = tensor.clone()
        world.barrier.wait()
        tensor.copy_(torch.stack(world.parts).sum(0))
        world.barrier.wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> PendingOperation:
        """Refuse it: blocks do not need this."""
        raise NotImplementedError

    def start_reduce(self, tensor: Tensor, *, target: int) -> PendingOperation:
        """Refuse it: blocks do not need this."""
        raise NotImplementedError

    def start_broadcast(self, tensor: Tensor, *, source: int) -> PendingOperation:
        """Refuse it: blocks do not need this."""
        raise NotImplementedError

    def start_all_gather(self, tensor: Tensor, *, into: Tensor) -> PendingOperation:
        """Refuse it: blocks do not need this."""
        raise NotImplementedError

    def start_reduce_scatter(self, parts: Tensor, *, into: Tensor) -> PendingOperation:
        """Refuse it: blocks do not need this."""
        raise NotImplementedError
