"""How long is waited before something counts as stuck: every rung from what a step takes.

    a step  <  no step is done (``stall_s``)  <  a rank waits for a peer (``wait_s``)

Who waits longer knows less: the leader sees every node, and a rank only that a peer is silent. So
ranks give up by themselves only where nobody leads. Each rung has a floor, as machines are busy.
"""

from __future__ import annotations

from agents.protocol.records import GenerationRecord
from sailord.core.options import Options
from sailord.core.proposal import Proposal
from sailord.core.state import Active

STEPS_TO_STOP = 3
"""Of a stop: the step at hand, the next one, and one more for what is sealed."""


def step_of(active: Active, proposal: Proposal) -> float:
    """What a step is taken to take: as predicted, or as the last plan was measured, if longer."""
    return max(proposal.iteration_s, active.progress.step_s or 0.0)


def stall_s(options: Options, active: Active) -> float:
    """Without a step for so long, a running generation counts as stuck."""
    return _stall_s(options, _running_step_s(active))


def stop_s(options: Options, active: Active) -> float:
    """For what runs to come to the end of a step, and to seal it."""
    return options.stop_s + STEPS_TO_STOP * _running_step_s(active)


def start_s(options: Options, proposal: Proposal) -> float:
    """From a generation's record in the store to the first step of all its members."""
    return options.start_s + 3 * proposal.move_s


def adopted_start_s(options: Options, record: GenerationRecord) -> float:
    """The same, for a leader that did not open it and knows what its ranks were told to wait."""
    return max(options.start_s, record.wait_s / 2)


def wait_s(options: Options, proposal: Proposal, step_s: float) -> float:
    """For a rank in a collective: it also meets there who fetches for longer than itself."""
    return max(2 * _stall_s(options, step_s), 2 * start_s(options, proposal))


def _stall_s(options: Options, step_s: float) -> float:
    return max(options.stall_s, options.stall_steps * step_s)


def _running_step_s(active: Active) -> float:
    predicted = 0.0 if active.generation is None else active.generation.step_s
    return max(predicted, active.progress.step_s or 0.0)
