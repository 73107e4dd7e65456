"""How long the controller waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """How long the controller waits for what, and how often it tries."""

    failures_gather_s: float = 0.1
    notices_gather_s: float = 0.5
    start_gather_s: float = 1.0
    additions_gather_s: float = 30.0
    lease_s: float = 10.0
    grace_s: float = 2.0
    """Beyond a lease: a new leader calls nobody lost before one lease and this have passed."""
    plan_s: float = 60.0
    stop_s: float = 60.0
    start_s: float = 120.0
    suspect_s: float = 1.5
    """A node without a lease is lost when its agent said nothing for so long, and no step was done
    for ``last_step_s``. An agent that starts anew has its lease back before; a silent death while
    all train is noticed within the node's lease and 2 s."""
    nap_s: float = 0.7
    """Without any event for so long, what others said meanwhile is yet to be heard."""
    still_s: float = 1.5
    """Without any event for so long, not even a tick, the controller itself stood still."""
    stall_s: float = 120.0
    """Without a step for so long, a running generation counts as stuck, ..."""
    stall_steps: float = 20.0
    """... or for this many steps, if that is longer; see ``sailord.core.timeouts``."""
    broken_s: float = 1.0
    """A generation whose members lost connections is over after so long, whoever is to blame."""
    probe_s: float = 0.2
    """A node that seems gone is probed again after so long, if it did not answer."""
    reconsider_s: float = 600.0
    failure_pause_s: float = 1.0
    """Before the next attempt after a failure that no lost machine explains; doubles with each."""
    failures_until_safe: int = 3
    failures_until_held: int = 5
    secure_s: float = 600.0
    """For the last step of a job that ends or pauses to become durable."""
    commit_pause_s: float = 5.0
    """Before the durable store is tried again that did not take a checkpoint, or was away."""
    slow_times: float = 1.5
    """A node is slow that computes so many times as long as it should."""
    slow_steps: int = 20
    slow_s: float = 60.0
    """It counts as slow after so many steps and so long without a break."""
    slow_share: float = 0.25
    """Of all nodes no more are left out for being slow."""
    steps_of_health: int = 20
    """A generation that did so many steps was healthy: earlier failures are forgiven."""
    comebacks_max: int = 6
    """The smallest plan is left after that many steps, and each time after twice as many, so often:
    a job of which only large plans fail does most of its steps where it can."""

    def last_step_s(self, lease_s: float) -> float:
        """A member may have taken part in a step that is no longer ago, whatever its lease says.

        Agents renew a lease each quarter of it: who is without one was silent for the other three.
        """
        return max(self.suspect_s, 0.75 * lease_s)
