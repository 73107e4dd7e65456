"""Draws from generators that a module keeps, holds in a closure or shares are noticed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from worker.data.generator_turns import turn
from worker.models.random_numbers.generator_states import GeneratorStates

GLOBAL = np.random.default_rng(1)


def closed_over():
    hidden = random.Random(2)

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = {"torch": [torch.Generator().manual_seed(3)]}

        def forward(self, x):
            return x + hidden.random() + GLOBAL.random()

    return Part(), hidden.random  # No global names the generator itself.


PART, DRAW_HIDDEN = closed_over()
DRAWS = {
    "torch": lambda: torch.rand(1),
    "own torch": lambda: torch.rand(1, generator=PART.own["torch"][0]),
    "python": random.random,
    "numpy": np.random.rand,
    "own python": DRAW_HIDDEN,
    "own numpy": GLOBAL.random,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_draw_is_noticed(kind):
    states = GeneratorStates(nn.Sequential(PART))
    before = states.read_if_free()
    assert states.moved_since(before) == (False, False)
    DRAWS[kind]()
    assert states.moved_since(before) == ("torch" in kind, "torch" not in kind)


def test_what_another_thread_may_have_drawn_is_not_counted():
    states = GeneratorStates(nn.Sequential(PART))
    before = states.read_if_free()
    with turn():
        assert states.read_if_free() is None
        random.random()
    assert states.moved_since(before) == (False, False)


def test_states_are_not_read_while_another_thread_has_its_turn(monkeypatch):
    states = GeneratorStates(nn.Identity())
    before = states.read_if_free()
    monkeypatch.setattr(GeneratorStates, "read", lambda _: pytest.fail("it may wait for ever"))
    with turn():
        assert states.moved_since(before) == (False, False)


def test_generators_of_python_and_numpy_that_return_to_their_state_have_not_moved():
    states = GeneratorStates(nn.Identity())
    before, python, numbers = states.read(), random.getstate(), np.random.get_state()
    random.random()
    np.random.rand()
    assert states.read() != before
    random.setstate(python)
    np.random.set_state(numbers)
    assert states.read() == before
