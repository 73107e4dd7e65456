"""Code of a module that draws its first random number after its first pass."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from simulator.documents.problems import InputError
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import plan_of
from worker.data.generator_turns import turn
from worker.data.shuffle import sample_numbers
from worker.script.recipe import Recipe
from worker.training.precision import FP64
from worker.training.trainer import RankTrainer

VOCABULARY = 40


OWN = {
    "torch": torch.Generator().manual_seed(4),
    "numpy": np.random.default_rng(4),
    "python": random.Random(4),
}
"""Generators that a script made."""


def of_torch(x):
    return torch.rand_like(x)


def of_own_torch(x):
    return torch.rand(x.shape, dtype=x.dtype, generator=OWN["torch"])


class Noisy(torch.nn.Module):
    """A block that adds noise to marked samples, and draws it always or where it needs it."""

    splits = {"up": "columns", "down": "rows"}  # noqa: RUF012 - as a user would write it

    def __init__(self, *, always, draw):
        super().__init__()
        self.always, self.draw = always, draw
        self.up, self.down = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)

    def forward(self, x):
        marked = x[:, 2:3, :1] > 0.5
        if self.always or marked.any():
            x = torch.where(marked, x + 0.1 * self.draw(x), x)
        return torch.cat((x[..., :1], self.down(self.up(x).tanh())[..., 1:]), -1)


class Loaded(list):
    """Samples that tell when each has been loaded by a number of ranks."""

    left = None

    def begin(self, ranks):
        self.left, self.all = Counter(dict.fromkeys(range(len(self)), ranks)), threading.Event()

    def __getitem__(self, index):
        if self.left is not None:
            self.left -= Counter([index])
            if not self.left:
                self.all.set()
        return super().__getitem__(index)


class Late(torch.nn.Module):
    """A model that adds noise to marked samples; only the first step has none."""

    def __init__(self, *, always, draw):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        with torch.no_grad():
            self.embed.weight[:, 0] = (torch.arange(VOCABULARY) == 5).float()
        self.blocks = torch.nn.Sequential(*(Noisy(always=always, draw=draw) for _ in range(3)))
        self.head = torch.nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def train_late(*, always=False, draw=of_torch, in_use=False, tp=1):
    """Train while no samples are loaded; return the losses of each rank."""
    rows = torch.randint(6, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(3))
    order = {"global_batch": 8, "count": 24, "seed": 0}
    for step in (1, 2):
        rows[sample_numbers(step, range(3, 5), **order), 2] = 5
    loaded = Loaded([{"input_ids": row, "labels": row} for row in rows])
    recipe = Recipe(
        model=lambda: Late(always=always, draw=draw),
        dataset=loaded,
        batch_size=8,
        steps=3,
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
        call_module=lambda module, batch: module(batch["input_ids"]),
    )
    assert recipe.seed == order["seed"]
    job = recipe.job()
    loaded.begin(tp)
    plan = plan_of(8, (1, [(0, len(job.model.layers), tp)]))

    def body(transport):
        rank = RankTrainer(
            *(job, plan, transport.rank, transport, recipe.data()), module=recipe, precision=FP64
        )
        found = [rank.step().loss]
        assert loaded.all.wait(60)
        with turn() if in_use else nullcontext():
            found += [rank.step().loss for _ in range(2)]
        rank.close()
        return found

    return run_as_threads(tp, body)


@pytest.mark.parametrize("in_use", [False, True], ids=["generators free", "generators in use"])
def test_code_that_draws_only_after_its_first_pass_draws_by_sample(in_use):
    """Passes are computed again, or are watched while a data set uses the generators."""
    assert train_late(in_use=in_use) == train_late(always=True)


def test_code_of_several_ranks_that_draws_only_after_its_first_pass_is_refused():
    """The ranks are threads here and share torch's generator, so one that is still in its embedding
    may notice.
    """
    place = r"model: (embedding|blocks\.\d)"
    with pytest.raises(InputError, match=f"{place}: draws random numbers in a later"):
        train_late(tp=2)


def test_a_generator_of_the_scripts_own_draws_by_sample_too():
    assert train_late(draw=of_own_torch) == train_late(always=True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "draw",
    [
        lambda _: random.random(),
        lambda _: np.random.rand(),
        lambda _: OWN["numpy"].random(),
        lambda _: OWN["python"].random(),
    ],
    ids=["python", "numpy", "own numpy", "own python"],
)
def test_late_numbers_that_are_not_drawn_by_torch_are_refused(draw, tp):
    with pytest.raises(InputError, match="draws numbers by Python's random or by numpy"):
        train_late(draw=draw, tp=tp)


def test_a_draw_in_a_single_pass_may_be_another_threads():
    """A service that a logger talks to draws how long it waits, for example."""
    drawn = []

    def once(x):
        if not drawn:
            drawn.append(random.random())
        return torch.rand_like(x)

    assert train_late(draw=once) == train_late(always=True)
