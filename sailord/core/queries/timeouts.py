"""Time limits, derived from the seconds of a step.

    a step  <  the leader calls a generation stuck (``stall_s``)  <  a rank gives up (``wait_s``)

The leader sees every node, and a rank only that a peer is silent. So a rank waits longer, and gives
up by itself only where there is no leader. Each limit has a floor, since machines are busy.
"""

from __future__ import annotations

from agents.protocol.records import GenerationRecord
from sailord.core.model.options import Options
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active

STEPS_TO_STOP = 3
"""Of a stop: the current step, the next one, and one more to seal the snapshot."""


def step_of(active: Active, proposal: Proposal) -> float:
    """Return the seconds of a step: predicted, or as measured under the last plan if longer."""
    measured_s = scaled_step_s(active, plain_s(proposal))
    if measured_s is None:
        measured_s = active.progress.step_s
    return max(proposal.iteration_s, measured_s or 0.0)


def plain_s(proposal: Proposal) -> float:
    """Return the seconds of a step that are predicted without what running steps correct."""
    return proposal.iteration_s if proposal.plain_s is None else proposal.plain_s


def scaled_step_s(active: Active, predicted_s: float) -> float | None:
    """Return the measured seconds of a step, scaled to a new plan by the predictions of both."""
    last, measured_s = active.generation, active.progress.step_s
    if last is None or measured_s is None or not (last.predicted_s and predicted_s):
        return None
    return measured_s * predicted_s / last.predicted_s


def stall_s(options: Options, active: Active) -> float:
    """Return after how long without a step a running generation is stuck."""
    return _stall_s(options, running_step_s(active))


def stop_s(options: Options, active: Active) -> float:
    """Return the time limit for all members to finish a step and seal it."""
    return options.stop_s + STEPS_TO_STOP * running_step_s(active)


def start_s(options: Options, proposal: Proposal) -> float:
    """Return the time limit from a generation's record to the first step of all its members."""
    return options.start_s + 3 * proposal.move_s


def adopted_start_s(options: Options, record: GenerationRecord) -> float:
    """Return the same for a new leader, which knows only how long the ranks wait."""
    return max(options.start_s, record.wait_s / 2)


def wait_s(options: Options, proposal: Proposal, step_s: float) -> float:
    """Return the time limit of a collective; it must exceed the slowest peer's fetch time."""
    return max(2 * _stall_s(options, step_s), 2 * start_s(options, proposal))


def _stall_s(options: Options, step_s: float) -> float:
    return max(options.stall_s, options.stall_steps * step_s)


def running_step_s(active: Active) -> float:
    """Return the seconds of a step under the last plan: predicted, or measured if longer."""
    predicted = 0.0 if active.generation is None else active.generation.step_s
    return max(predicted, active.progress.step_s or 0.0)
