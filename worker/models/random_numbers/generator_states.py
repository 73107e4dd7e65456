"""The states of random generators, by which code that draws from them is noticed.

They are read before and after each pass through a layer, so reading them takes about a
microsecond: of Python's and numpy's it is their memory, which is compared and never interpreted.
"""

from __future__ import annotations

import ctypes
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from worker.closure import closure_values
from worker.data.generator_turns import turn_if_free, turns_taken

_TWISTER_BYTES = 4 * (624 + 1)
"""Of a Mersenne Twister: 624 words, and the position among them."""
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_ITEMS_MAX = 1000
"""Longer lists are data."""
_LIBRARIES = ("torch", "transformers", "peft")
"""Packages whose modules keep no generators of their own."""


class States(NamedTuple):
    """The states of generators, to be compared."""

    of_torch: tuple[Any, ...]
    """Torch's own, on the CPU and the GPU, and those that a script made."""
    of_others: tuple[Any, ...]
    """Python's and numpy's, and those of their kinds that a script made."""
    turns: int = 0
    """How often a thread had begun to use the process's generators."""


class Moved(NamedTuple):
    """Which generators have moved."""

    of_torch: bool = False
    of_others: bool = False


class GeneratorStates:
    """Reads the states of the process's generators, and of those that a module's code keeps."""

    def __init__(self, module: nn.Module) -> None:
        own = list(own_generators(module))
        self._torch = [each.get_state for each in own if isinstance(each, torch.Generator)]
        others = (each for each in own if not isinstance(each, torch.Generator))
        self._others = [_make_python_reader(), _make_numpy_reader(), *map(_make_reader, others)]

    def read(self) -> States:
        """Return the present states."""
        others = tuple([read() for read in self._others])
        return States(self._read_torch(), others, turns_taken())

    def read_if_free(self) -> States | None:
        """Return the present states, unless another thread uses the generators."""
        with turn_if_free() as is_mine:
            return self.read() if is_mine else None

    def moved_since(self, before: States | None) -> Moved:
        """Return which have moved; none if another thread may have used them.

        While another thread has its turn, they are not read: torch holds a generator's lock while
        it makes the tensor of its state. If a garbage collection in there gives way to a thread
        that waits for the same lock, both wait for ever.
        """
        after = None if before is None else self.read_if_free()
        if before is None or after is None or after.turns != before.turns:
            return Moved()
        return Moved(after.of_torch != before.of_torch, after.of_others != before.of_others)

    def _read_torch(self) -> tuple[Any, ...]:
        offset = 0
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
            offset = torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
        own = [read().numpy().tobytes() for read in self._torch]
        return offset, torch.default_generator.get_state().numpy().tobytes(), *own


def own_generators(module: nn.Module) -> Iterator[Any]:
    """Yield the generators that the parts of a module keep, or that the code of these names.

    They are looked for among attributes, in the globals of a part's code, and in its closure.
    """
    known: set[int] = {id(torch.default_generator), id(_generator_behind(random.getstate))}
    known.add(id(_generator_behind(np.random.get_state)))
    scopes: dict[int, list[Any]] = {}
    for part in module.modules():
        scopes[id(part)] = [each for key, each in vars(part).items() if key != "_modules"]
        code = inspect.unwrap(type(part).forward)
        if code.__module__.partition(".")[0] in _LIBRARIES or not inspect.isfunction(code):
            continue
        scopes[id(code.__globals__)] = list(code.__globals__.values())
        scopes[id(code)] = list(closure_values(code).values())
    values = (each for scope in scopes.values() for each in scope)
    for value in values:
        for each in _items_of(value):
            if isinstance(each, _KINDS) and id(each) not in known:
                known.add(id(each))
                yield each


def _items_of(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield what lists and mappings hold; other objects, such as configurations, are not opened."""
    if depth and isinstance(value, dict | list | tuple) and len(value) <= _ITEMS_MAX:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _items_of(each, depth - 1)
    else:
        yield value


def _generator_behind(method: Any) -> Any:
    """Return the generator behind a function of a module."""
    return method.__self__


def _make_reader(generator: Any) -> Callable[[], Any]:
    """Return what reads the state of a generator that a script made."""
    if isinstance(generator, random.Random):
        return generator.getstate
    if isinstance(generator, np.random.Generator):
        return lambda: repr(generator.bit_generator.state)
    return lambda: repr(generator.get_state())


def _make_python_reader() -> Callable[[], Any]:
    """Return what reads Python's generator; ``getstate`` makes 625 integers, which takes 6 µs."""
    generator = _generator_behind(random.getstate)
    address = id(generator) + object.__basicsize__
    *words, position = random.getstate()[1]
    expected = b"".join(each.to_bytes(4, sys.byteorder) for each in (position, *words))
    is_large = type(generator).__basicsize__ >= object.__basicsize__ + _TWISTER_BYTES
    if not is_large or ctypes.string_at(address, _TWISTER_BYTES) != expected:
        return random.getstate  # Another Python lays it out otherwise.
    return lambda: ctypes.string_at(address, _TWISTER_BYTES)


def _make_numpy_reader() -> Callable[[], Any]:
    """Return what reads numpy's generator; ``get_state`` takes 30 µs."""
    generators: Any = np.random  # Its types leave the function out.
    bits = generators.get_bit_generator()
    if not isinstance(bits, np.random.MT19937):
        return lambda: repr(bits.state)
    address = bits.ctypes.state_address

    def read() -> bytes:
        # Naming the generator keeps its memory, even if a script puts another in its place.
        assert bits is not None, "it is kept"
        return ctypes.string_at(address, _TWISTER_BYTES)

    return read
