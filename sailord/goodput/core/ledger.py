"""The ledger: a fold over usage samples of the cluster, with sums by cause.

Time is counted in whole microseconds of GPUs, so that the causes sum to the wall clock exactly.
A *usage sample* shows the cluster at one moment. The time until the next sample is booked as the
first one shows. A running step is booked on ``step_under_way`` until it ends, and is then split by
what its ranks measured; if it never ends, its time is booked on what ended it. All sums but
``step_under_way`` only grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agents.protocol.records import JobId
from sailord.goodput.core.causes import Cause

GAP_S = 120.0
"""A longer time without a sample is booked as ``unobserved``: there was no leader."""
IN_STEP: Cause = "step_under_way"


@dataclass(frozen=True, slots=True)
class CauseLoad:
    """The GPUs that one cause holds at a moment, and what they cost."""

    cause: Cause
    gpus: int
    usd_per_hour: float = 0.0
    """Of GPUs that are not rented and have a known price."""
    rented_usd_per_hour: float = 0.0
    """Of rented instances: their dollars follow the provider's bill."""
    unpriced_gpus: int = 0
    rented_gpus: int = 0
    """Part of ``gpus``: their time follows the bill, too."""


@dataclass(frozen=True, slots=True)
class OtherJobLoads:
    """The part of all loads that another job holds, which shares the cluster."""

    job: JobId
    """Empty: no job has these GPUs."""
    loads: tuple[CauseLoad, ...]


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How far the running generation is, and what its ranks measured of a step."""

    job: JobId
    generation: int
    number: int
    """Steps done."""
    first: int
    """Steps that were done when the generation began."""
    usual_s: float = 0.0
    """The expected duration of a step; 0: unknown."""
    busy_s: float | None = None
    """Sum over ranks of compute time per step; ``None``: not known."""
    stall_s: float = 0.0
    """How long a snapshot pauses a step, on average over steps."""
    slow_s: float = 0.0
    """How long a step waits for a straggler."""


@dataclass(frozen=True, slots=True)
class UsageSample:
    """What sailord sees at one moment."""

    at: float
    loads: tuple[CauseLoad, ...]
    step: StepProgress | None = None
    """``None``: no generation trains."""
    ended_by: Cause = "moving_detect"
    """The cause on which a step is booked that never ends."""
    bill_usd: float | None = None
    """The provider's bill for rented instances so far; ``None``: unknown."""
    bill_gpu_us: int | None = None
    """The GPU microseconds on that bill."""
    job: JobId | None = None
    """The job that has what no other job has."""
    beside: tuple[OtherJobLoads, ...] = ()
    """What the other jobs have."""


@dataclass(frozen=True, slots=True)
class Account:
    """The sums of one cause."""

    cause: Cause
    gpu_us: int = 0
    """GPU microseconds."""
    usd: float = 0.0
    unpriced_gpu_us: int = 0
    """Part of ``gpu_us`` at unknown prices."""


@dataclass(frozen=True, slots=True)
class HighestStep:
    """The highest step that a job reached: up to it, steps after a loss are repetitions."""

    job: JobId
    step: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """All bookings so far, and the last sample; stored for the next leader."""

    since_us: int | None = None
    """Microseconds since the epoch; ``None``: nothing was seen yet."""
    until_us: int = 0
    accounts: tuple[Account, ...] = ()
    loads: tuple[CauseLoad, ...] = ()
    step: StepProgress | None = None
    step_since_us: int = 0
    """When the step under way began."""
    reached: HighestStep | None = None
    bill_from_usd: float | None = None
    """The provider's bill when this ledger began."""
    billed_usd: float = 0.0
    """Booked for rented instances."""
    bill_usd: float = 0.0
    """Their bill since this ledger began."""
    bill_from_us: int | None = None
    """The same of the GPU microseconds on the bill."""
    billed_us: int = 0
    bill_us: int = 0
    job: JobId | None = None
    """The job that had what no other job had at the last sample."""
    beside: tuple[OtherJobLoads, ...] = ()
    """What the other jobs had at the last sample."""

    @property
    def ahead_us(self) -> int:
        """GPU microseconds booked beyond the bill, as ``ahead_usd``."""
        return max(self.billed_us - self.bill_us, 0)

    @property
    def ahead_usd(self) -> float:
        """Booked beyond the bill, since an instance had already ended; later bookings use it up."""
        return max(self.billed_usd - self.bill_usd, 0.0)

    def account(self, cause: Cause) -> Account:
        """Return the account of a cause, which may be empty."""
        return next((each for each in self.accounts if each.cause == cause), Account(cause))


def gpus_of(ledger: Ledger) -> int:
    """Return the GPUs that were paid for at the last sample."""
    return sum(each.gpus for each in ledger.loads)


def fold(ledger: Ledger, sample: UsageSample) -> Ledger:
    """Return the ledger after a sample."""
    at_us = round(sample.at * 1e6)
    if ledger.since_us is None:
        return Ledger(
            at_us,
            at_us,
            loads=sample.loads,
            step=sample.step,
            step_since_us=at_us,
            reached=_raise_highest(None, sample.step),
            bill_from_usd=sample.bill_usd,
            bill_from_us=sample.bill_gpu_us,
            job=sample.job,
            beside=sample.beside,
        )
    books = _Books({each.cause: each for each in ledger.accounts})
    passed_us = max(at_us - ledger.until_us, 0)
    is_gap = passed_us > GAP_S * 1e6
    for load in ledger.loads:
        books.add("unobserved" if is_gap else load.cause, load, passed_us)
    # Unobserved time belongs to no step. A new leader's clock may be behind the last one's.
    shift_us = passed_us if is_gap else min(at_us - ledger.until_us, 0)
    ledger = replace(ledger, step_since_us=ledger.step_since_us + shift_us)
    ledger = _with_gpu_bill(ledger, sample, books, passed_us, is_gap=is_gap)
    ledger = _with_bill(ledger, sample, books, passed_us, is_gap=is_gap)
    step_since_us = _settle(ledger, sample, books, at_us)
    return replace(
        ledger,
        until_us=at_us,
        accounts=books.accounts(),
        loads=sample.loads,
        step=_advance_step(ledger.step, sample.step),
        step_since_us=step_since_us,
        reached=_raise_highest(ledger.reached, sample.step),
        job=sample.job,
        beside=sample.beside,
    )


def booked_beside(old: Ledger, new: Ledger) -> Iterator[tuple[JobId, tuple[Account, ...]]]:
    """Yield what a fold from one ledger to the next booked for the jobs beside the first."""
    passed_us = max(new.until_us - old.until_us, 0)
    is_gap = passed_us > GAP_S * 1e6
    for each in old.beside:
        books = _Books()
        for load in each.loads:
            books.add("unobserved" if is_gap else load.cause, load, passed_us)
        yield each.job, books.accounts()


@dataclass(eq=False)
class _Books:
    """The accounts while a sample is booked."""

    by_cause: dict[Cause, Account] = field(default_factory=dict)

    def add(self, cause: Cause, load: CauseLoad, us: int) -> None:
        """Book time of a load at its own prices; that of rented GPUs follows the bill."""
        self.put(
            Account(
                cause,
                (load.gpus - load.rented_gpus) * us,
                load.usd_per_hour * us / 3.6e9,
                load.unpriced_gpus * us,
            )
        )

    def put(self, more: Account) -> None:
        """Add to an account."""
        old = self.by_cause.get(more.cause)
        if old is not None:
            more = Account(
                more.cause,
                old.gpu_us + more.gpu_us,
                old.usd + more.usd,
                old.unpriced_gpu_us + more.unpriced_gpu_us,
            )
        self.by_cause[more.cause] = more

    def accounts(self) -> tuple[Account, ...]:
        """Return those that are not empty, in a fixed order."""
        found = (each for _, each in sorted(self.by_cause.items()))
        return tuple(each for each in found if each != Account(each.cause))


def _with_gpu_bill(
    ledger: Ledger, sample: UsageSample, books: _Books, passed_us: int, *, is_gap: bool
) -> Ledger:
    """Book the time of rented GPUs: as it was seen, and in all what the bill grew by.

    It grew by more if an instance was created since the last sample, and by less if one had ended
    before that was known.
    """
    seen = [(each.cause, each.rented_gpus * passed_us) for each in ledger.loads]
    whole = sum(us for _, us in seen)
    bill, begun = sample.bill_gpu_us, ledger.bill_from_us
    owed = whole if bill is None or begun is None else max(bill - begun - ledger.billed_us, 0)
    booked = upto = 0
    for cause, us in seen:
        upto += us
        part = min(owed, whole) * upto // whole - booked if whole else 0
        booked += part
        books.put(Account("unobserved" if is_gap else cause, part))
    books.put(Account("unobserved" if is_gap else "booting", owed - booked))
    if begun is None:
        return replace(ledger, bill_from_us=bill)
    ledger = replace(ledger, billed_us=ledger.billed_us + owed)
    return ledger if bill is None else replace(ledger, bill_us=bill - begun)


def _with_bill(
    ledger: Ledger, sample: UsageSample, books: _Books, passed_us: int, *, is_gap: bool
) -> Ledger:
    """Book the growth of the bill for rented instances, in proportion to their costs."""
    if sample.bill_usd is None:
        return ledger
    if ledger.bill_from_usd is None:
        return replace(ledger, bill_from_usd=sample.bill_usd)
    bill = sample.bill_usd - ledger.bill_from_usd
    owed = bill - ledger.billed_usd
    if owed > 0:
        weights = _weights(ledger.loads if passed_us else ()) or _weights(sample.loads)
        if is_gap:
            weights = {"unobserved": 1.0}
        whole = sum(weights.values())
        for cause, weight in (weights or {"booting": 1.0}).items():
            books.put(Account(cause, usd=owed * weight / whole if weights else owed))
    return replace(ledger, bill_usd=bill, billed_usd=max(ledger.billed_usd, bill))


def _weights(loads: tuple[CauseLoad, ...]) -> Mapping[Cause, float]:
    return {each.cause: each.rented_usd_per_hour for each in loads if each.rented_usd_per_hour > 0}


def _settle(ledger: Ledger, sample: UsageSample, books: _Books, at_us: int) -> int:
    """Book the step under way if it ended; return when the present one began."""
    before, after = ledger.step, sample.step
    is_same = (
        before is not None
        and after is not None
        and (before.job, before.generation) == (after.job, after.generation)
    )
    if is_same and before is not None and after is not None and after.number <= before.number:
        return ledger.step_since_us
    whole = books.by_cause.pop(IN_STEP, Account(IN_STEP))
    if not is_same or before is None or after is None:
        books.put(replace(whole, cause=sample.ended_by))
        return at_us
    took_us = at_us - ledger.step_since_us
    left = _Rest(whole, books)
    if ledger.reached is not None and ledger.reached.job == after.job:
        again = min(ledger.reached.step, after.number) - before.number
        if again > 0:
            left.take("recovering", whole.gpu_us * again // (after.number - before.number))
    if before.number <= before.first and after.usual_s > 0:
        late_us = took_us - round(after.usual_s * 1e6 * (after.number - before.number))
        if late_us > 0:
            left.take("moving_first_step", left.gpu_us * late_us // took_us)
    _split(left, after, steps=after.number - before.number, took_us=took_us)
    return at_us


def _split(left: _Rest, step: StepProgress, *, steps: int, took_us: int) -> None:
    """Split the time of whole steps by what their ranks measured."""
    if took_us > 0:
        whole = left.gpu_us
        left.take("checkpoint_stall", whole * round(step.stall_s * 1e6) * steps // took_us)
        left.take("slow_node", whole * round(step.slow_s * 1e6) * steps // took_us)
        if step.busy_s is not None:
            left.take("training", min(round(step.busy_s * 1e6) * steps, left.gpu_us))
            left.take("idle_in_plan", left.gpu_us)
    left.take("training", left.gpu_us)


@dataclass(eq=False)
class _Rest:
    """The rest of an amount while parts of it are booked; dollars are split like the time."""

    whole: Account
    books: _Books
    gpu_us: int = field(init=False)
    usd: float = field(init=False)
    unpriced: int = field(init=False)

    def __post_init__(self) -> None:
        self.gpu_us, self.usd = self.whole.gpu_us, self.whole.usd
        self.unpriced = self.whole.unpriced_gpu_us

    def take(self, cause: Cause, gpu_us: int) -> None:
        """Book a part on a cause; at most what is left."""
        part_us = max(min(gpu_us, self.gpu_us), 0)
        is_all = part_us == self.gpu_us
        usd = self.usd if is_all else self.usd * part_us / self.gpu_us
        unpriced = self.unpriced if is_all else self.unpriced * part_us // self.gpu_us
        if part_us or usd:
            self.books.put(Account(cause, part_us, usd, unpriced))
        self.gpu_us, self.usd = self.gpu_us - part_us, self.usd - usd
        self.unpriced -= unpriced


def _advance_step(before: StepProgress | None, after: StepProgress | None) -> StepProgress | None:
    """Return the new step; a new leader that has no report yet does not go back."""
    if before is None or after is None:
        return after
    if (before.job, before.generation) != (after.job, after.generation):
        return after
    return replace(after, number=max(before.number, after.number))


def _raise_highest(before: HighestStep | None, step: StepProgress | None) -> HighestStep | None:
    if step is None:
        return before
    if before is None or before.job != step.job:
        return HighestStep(step.job, step.number)
    return HighestStep(step.job, max(before.step, step.number))
