"""Random modules with dropout and frozen parts under random plans, against a plain loop.

The loop computes whole batches in one process. It knows of the runtime only which number belongs to
which element of a sample's dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.hf_families import all_in_fp64
from tests.worker.module_runs import STEPS, Training, assert_close, recipe_of, trained
from tests.worker.random_plan import any_interleaved_plan, any_plan
from worker.models.random_numbers.keyed_random import KeyedRandom
from worker.models.random_numbers.microbatch_context import MicroBatch
from worker.script.recipe import Recipe

BATCH, WIDTH, INNER, LENGTH = 8, 8, 16, 3
PLANS = 5
"""For each module."""


class Block(nn.Module):
    """A block of a user's, with what its settings say."""

    splits: ClassVar[dict[str, str]] = {"gate": "columns", "up": "columns", "down": "rows"}

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=draw.random() < 0.5) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH)
        self.before, self.after = (draw.choice([0.0, 0.1, 0.4]) for _ in range(2))
        self.noise = draw.choice([0.0, 0.0, 0.2])

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.norm(x), self.before, self.training)
        h = self.down(functional.silu(self.gate(h)) * self.up(h))
        if self.noise and self.training:
            h = h + self.noise * functional.dropout(torch.ones_like(h), 0.5)
        return x + functional.dropout(h, self.after, self.training)


class Network(nn.Module):
    """An input layer, blocks and an output layer, some of them frozen in whole or in part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = Random(f"module {seed}")
        torch.manual_seed(seed)
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(draw.randint(3, 6)))
        self.leave = nn.Linear(WIDTH, 2)
        self.drops_input = draw.choice([0.0, 0.2])
        self.requires_grad_(False)
        self.blocks[draw.randrange(len(self.blocks))].requires_grad_(True)
        for part in (self.enter, *self.blocks, self.leave):
            for parameter in part.parameters() if draw.random() < 0.7 else ():
                parameter.requires_grad = draw.random() < 0.8

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.enter(x), self.drops_input, self.training)
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets; the last column says which places count, a varying number."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(BATCH * STEPS):
        x, y = (torch.randn(LENGTH, n, generator=generator).double() for n in (4, 3))
        y[:, -1] = torch.arange(LENGTH) <= number % LENGTH
        found.append((x, y))
    return found


def loss(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    wanted, counts = batch[1][..., :-1], batch[1][..., -1:]
    return ((out - wanted).square() * counts).sum(), counts.sum()


def recipe(seed: int) -> Recipe:
    """Return what a script with this module gives."""
    return recipe_of(
        lambda: Network(seed).double().train(),
        dataset=samples(),
        loss=loss,
        make_optimizer=lambda m: torch.optim.SGD(
            [p for p in m.parameters() if p.requires_grad], lr=0.1
        ),
    )


@contextmanager
def keyed_dropout(module: Network, seed: int, step: int) -> Iterator[None]:
    """Let each sample draw alone: the numbers of its step, its place in the batch and the layer."""
    layer = draws = 0

    def enters(index: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal layer, draws
            layer, draws = index, 0

        return hook

    def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        nonlocal draws
        if not training or p == 0:
            return x
        masks = []
        for place in range(len(x)):
            random = KeyedRandom(MicroBatch(seed, step, torch.tensor([place])), layer=layer)
            for _ in range(draws):
                random.uniform((1,), x.device)
            masks.append(random.uniform((1, *x.shape[1:]), x.device) < 1 - p)
        draws += 1
        return torch.where(torch.cat(masks), x / (1 - p), 0.0)

    parts = [module.enter, *module.blocks, module.leave]
    hooks = [part.register_forward_pre_hook(enters(n)) for n, part in enumerate(parts)]
    kept, functional.dropout = functional.dropout, dropout
    try:
        yield
    finally:
        functional.dropout = kept
        for hook in hooks:
            hook.remove()


def independent_loop(script: Recipe, job: Job, seed: int) -> Training:
    """Train by torch alone, on whole batches."""
    module = Network(seed).double().train()
    trained_ones = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained_ones, lr=0.1)
    found = Training([], {}, {})
    for step in range(STEPS):
        batch = script.data().batch(step, range(BATCH)).inputs
        optimizer.zero_grad()
        with keyed_dropout(module, job.data.seed, step):
            total, count = loss(module(batch[0]), batch)
        (total / count).backward()
        if step == 0:
            given = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            norm = float(torch.stack([g.norm() for g in given.values()]).norm())
            found = found._replace(gradients={n: g.clone() for n, g in given.items()}, norm=norm)
        optimizer.step()
        found.losses.append(float((total / count).detach()))
    return found._replace(weights={n: p.detach() for n, p in module.named_parameters()})


def plans(job: Job, seed: int) -> Iterator[Plan]:
    draw = Random(f"plans of {seed}")
    for number in range(PLANS):
        interleaved = any_interleaved_plan(draw, job, ranks_max=6) if number % 2 else None
        yield interleaved or any_plan(draw, job, ranks_max=6)


@pytest.mark.slow
@pytest.mark.sim
def test_any_module_trains_under_any_plan_as_in_an_independent_loop(examples: int) -> None:
    with all_in_fp64():
        for seed in range(max(2, examples // 10)):
            script = recipe(seed)
            job = script.job()
            wanted = independent_loop(script, job, seed)
            for plan in plans(job, seed):
                found = trained(script, job, plan)
                assert_close(found, wanted, f"seed {seed}: {plan}", rel=1e-11)
                assert found.gradients.keys() == wanted.gradients.keys()
