"""The options of a stage, its times in them, and what else its machine may hold."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.arrays import Floats, Ints
from simulator.spec.job import RecomputePolicy

BEHIND_MAX = 11
"""Stages with more stages behind them are treated as having this many."""


@dataclass(frozen=True, slots=True)
class StageOption:
    """How a stage may run, regardless of its zone."""

    gpu: str
    tp: int
    recompute: RecomputePolicy


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Times of stages of one micro batch size; arrays are [choice, first layer, end].

    Under the policy ``auto`` they count no recomputation: ``recomputation`` has it.
    """

    micro_batch: int
    choices: tuple[StageOption, ...]
    work: Floats
    """Compute only, forward and backward, by [choice, layer]."""
    forward_work: Floats
    """The forward part of ``work``."""
    forward: Floats
    """Forward including the overhead of messages."""
    backward: Floats
    """Backward including the overhead of messages."""
    through: Floats
    """The part of ``work`` in a round trip, by [choice, layer]: all if backwards are whole."""
    inputs: Floats
    """The part of ``backward`` in a round trip: the gradient of the weights may come later."""
    below_top: Floats
    """Backward of all layers of the stage except the last one."""
    last_send: Floats
    """Overhead of sending the last gradient, by [choice]."""
    optimizer: Floats
    ahead: Floats
    """By [choice, first layer]: time of the first micro batch through the layers before it."""
    home: Floats
    """By [choice, first layer]: time of the last gradient back through them."""
    behind: Floats
    """By [choice, end]: round trip through all later layers, as one stage."""
    hop_s: float
    """Seconds that each further stage adds to a round trip."""
    leave_machine_s: float
    """Extra round-trip seconds of an inter-machine hop."""
    transfer: Floats
    """By [choice, boundary]: least seconds of a message over it, one way."""
    leave: Floats
    """``transfer`` to another machine."""
    iteration_s: Floats
    """By choice, the fixed overhead of every iteration."""

    is_divided: bool
    """Whether the times also hold for divided backwards."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.work[0])


@dataclass(frozen=True, slots=True, eq=False)
class Neighbourhood:
    """A case of what else a stage's machine holds; arrays are by choice, as in ``Times``."""

    rest: Floats
    """By [stages behind or 1, choice, first layer, end]: least seconds of an iteration before the
    stage's first pass and after its last one, where the stage before may be on its machine."""
    rest_alone: Floats
    """``rest`` where the stage before is on another machine."""
    end: Floats
    """By [choice, end], of a first stage: least seconds after its last pass."""
    fewest: int
    """Stages of the pipeline on the machine, side by side."""
    most: Ints
