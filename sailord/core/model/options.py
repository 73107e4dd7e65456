"""Time limits, intervals and thresholds of the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Options:
    """Time limits, intervals and thresholds of the controller; those of the class are constants.

    ``sailord.config.KEYS`` names those that operators set; tests set others.
    """

    failures_gather_s: ClassVar[float] = 0.1
    """After a loss, wait this long for others before a new plan is asked for."""
    notices_gather_s: ClassVar[float] = 0.5
    """After a notice of preemption, wait this long for others before a new plan is asked for."""
    start_gather_s: float = 1.0
    """While nothing runs, wait this long for further nodes before a plan is asked for."""
    additions_gather_s: float = 30.0
    """While the job trains, wait this long for further new nodes before a plan is asked for."""
    lease_s: float = 10.0
    """The leader's lease, and that of nodes whose records name none."""
    grace_s: float = 2.0
    """Grace period after takeover, beyond one lease, before nodes without one may be given up."""
    plan_s: ClassVar[float] = 60.0
    """Time limit for the planner's answer."""
    stop_s: float = 60.0
    """Time limit for a generation to stop at a step."""
    start_s: float = 120.0
    """Time limit for a generation to start, until its first step; ``queries.timeouts`` adds
    three times the predicted time of the move."""
    unprepared_s: float = 90.0
    """A job is held if after this time no node could be prepared for it: their second attempt,
    60 s after the first, has failed too."""
    suspect_s: float = 1.5
    """A node without a lease is lost after this time without a report. While the job trains,
    ``last_step_s`` must have passed without a step, too. A restarted agent renews its lease
    sooner."""
    nap_s: ClassVar[float] = 0.7
    """After this time without any event sailord was slow: reports from that time may still come."""
    still_s: ClassVar[float] = 1.5
    """After this time without any event, not even a tick, sailord itself was stopped."""
    stall_s: float = 120.0
    """A running generation is stuck after this time without a step; see ``stall_steps``."""
    stall_steps: ClassVar[float] = 20.0
    """It is stuck after the time of this many steps, if that is longer than ``stall_s``."""
    broken_s: float = 1.0
    """A generation whose members lost connections ends after this time, regardless of cause."""
    turn_s: ClassVar[float] = 5.0
    """A job whose turn has come again waits this long for nodes that still report about another
    job: they may hold snapshots of it."""
    probe_s: float = 0.2
    """Seconds between two probes of a node that may be dead."""
    reconsider_s: ClassVar[float] = 600.0
    """Seconds until the planner is asked again about nodes and a plan that it was asked about."""
    failure_pause_s: float = 1.0
    """Backoff after a failure that no lost node explains; each further one in a row doubles it."""
    failures_until_held: int = 3
    """A job is held after this many failures in a row that no lost node explains."""
    secure_s: float = 600.0
    """Time for the last step of a job that ends or pauses to become durable."""
    commit_pause_s: ClassVar[float] = 5.0
    """Pause before the durable store is tried again after a failure."""
    slow_times: float = 1.5
    """A straggler computes this many times as long as its peers or its past."""
    slow_steps: int = 20
    slow_s: float = 60.0
    """A node is one once it was that slow for ``slow_steps`` and these seconds without a break."""
    left_out_share: ClassVar[float] = 0.25
    """At most this share of all nodes is left out as stragglers."""
    ended_jobs_kept: int = 200
    """Ended jobs whose records stay in the store; the first submitted are deleted first."""
    share: bool = False
    """Several jobs run at once, each on a part of the nodes; else they wait in line."""
    steps_of_health: int = 20
    """A failure no longer counts once this many further steps were done."""

    reserve_s: float = 0.0
    """Where sailord rents, the money for a job's last seconds is kept for saving its state."""

    @property
    def rents(self) -> bool:
        """Whether sailord rents instances."""
        return self.reserve_s > 0

    def last_step_s(self, lease_s: float) -> float:
        """Return the age up to which a step proves that a member without a lease was alive.

        Agents renew a lease every quarter of it: a node without one was silent for three quarters.
        """
        return max(self.suspect_s, 0.75 * lease_s)
