"""The protocol's invariants I1 to I20, each as a rule that yields violations in a story."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.story import Fault, File, Generation, Sample, Step, Story

Rule = Callable[[Story], Iterator[str]]
ASKED = ""
"""Yielded each time that a rule applies; a violation, if any, follows as a text."""

TAKEN = "taken"
"""The moment at which a machine is lost with its memory, announced or not."""
END = "end"
"""The job is cancelled and its resources are released."""
PREEMPTIONS = ("node", "node and back", "notice", "doubled notice", "no notice", "drain", "swap")
"""Faults that do nothing but remove a machine."""
VIOLENT = (
    *(TAKEN, "rank", "stop rank", "stop node", "full memory", "stop agent", "point"),
    # Agents may be down for longer than a lease.
    *("agent", "all agents", "everybody in charge"),
    # A node counts as lost if it is unreachable or its clock is not trusted.
    *("partition", "one way", "slow link", "resets", "sailord cut", "slow store", "clock"),
)
"""Faults after which a reconfiguration may be unplanned."""
QUIET = (
    *("agent", "all agents", "sailord", "sailord away", "everybody in charge", "stop sailord"),
    *("store away", "store member", "stop member"),
)
"""Faults that must not interrupt workers."""
AWAY = ("sailord away", "store away")
OF_SAILORD = ("sailord", "sailord away", "everybody in charge", "stop sailord")
OF_RANKS = ("rank", "stop rank")
"""Faults that affect neither a machine's memory nor the agent that serves it."""
NEAR_S = 15.0
"""The effects of a fault appear within this time, in seconds."""
HELD_UP_S = 60.0
"""Longest time without progress. The protocol allows five times the sum of the phases' deadlines:
20 minutes with the default options, too long for a storm to detect."""
SPIN = 8
"""Generations in a row without a step: a job is held after fewer failures of its own."""
AWAY_S = 5.0
ALARM_S = 3.0
PREDICTED = {"detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"}
"""The phases of a reconfiguration, measured and predicted."""
TIMED_S = 5.0
"""A reconfiguration's timing is published within this time after its first step, in seconds."""


def i1(story: Story) -> Iterator[str]:
    """One effective leader: every record carries the term of the leader at that moment."""
    leader, highest = 0, 0
    for change in story.changes:
        if change.key.endswith("/leader"):
            leader = 0 if change.value is None else change.created
            if leader and leader < highest:
                yield f"revision {change.revision}: term {leader} leads after term {highest}"
            highest = max(highest, leader)
        elif change.key.endswith(f"job/{story.job}/gen") and change.value is not None:
            term = change.value["term"]
            yield ASKED
            if term != leader:
                yield f"revision {change.revision}: term {term} writes, term {leader} leads"


def i2(story: Story) -> Iterator[str]:
    """Generation numbers grow by one; each has one plan, one restore point, one set of members."""
    for before, after in pairwise(story.generations):
        yield ASKED
        if after.number == before.number:
            if after.what != before.what:
                yield f"generation {after.number} was written twice, with different contents"
        elif after.number != before.number + 1:
            yield f"generation {after.number} follows {before.number}"


def i3(story: Story) -> Iterator[str]:
    """Writes of a generation have no effect once the next one is open."""
    number = 0
    durables = {change.revision: generation for change, generation, _ in story.durables()}
    opened = {generation.revision: generation.number for generation in story.generations}
    lowered = set(opened)  # A rollback and the opening of its generation are one transaction.
    for revision in sorted({*durables, *opened}):
        number = opened.get(revision, number)
        of = durables.get(revision)
        yield ASKED
        if of is not None and of != number and revision not in lowered:
            yield f"a checkpoint of generation {of} was committed under generation {number}"
    for generation in story.opened:
        of, step = generation.restored
        # Survivors may have sealed one more step without having reported it.
        if of and step > story.highest(of) + 1:
            yield f"generation {generation.number} begins at step {step}, which {of} never did"
        if of >= generation.number:
            yield f"generation {generation.number} restores from generation {of}"


def i4(story: Story) -> Iterator[str]:
    """The durable step never decreases, and every byte of each checkpoint is readable."""
    back = {generation.revision for generation in story.opened if is_rollback(story, generation)}
    for (_, _, before), (change, _, after) in pairwise(story.durables()):
        yield ASKED
        if after < before and change.revision not in back:
            yield f"revision {change.revision}: step {after} is durable after step {before}"
    for commit in story.commits:
        yield ASKED
        for fault in commit["faults"]:
            yield f"step {commit['step']}: {fault}"


def i5(story: Story) -> Iterator[str]:
    """Never restore from before the durable step; one lost node costs one interval at most."""
    for before, after in pairwise(story.opened):
        step = after.restored[1]
        durable = next(
            (s for c, _, s in reversed(story.durables()) if c.revision < after.revision), 0
        )
        if is_rollback(story, after):
            continue
        yield ASKED
        if step < durable:
            yield f"generation {after.number} begins at step {step}, and {durable} was durable"
        lost = repeated_steps(story, before, after)
        disrupted = disruptive_faults(story, before, after)
        domains = {name for f in disrupted for name in f.nodes}
        # The newest snapshot may still be in transfer to the buddy when the machine is lost or
        # its agent is down for longer than its lease.
        is_sent = any(f.kind not in OF_RANKS for f in disrupted)
        if len(domains) == 1 and lost > story.memory_every + is_sent:
            yield f"generation {after.number} lost {lost} steps with {', '.join(domains)}"


def is_rollback(story: Story, generation: Generation) -> bool:
    """Return whether this is a rollback: durable step and generation in one transaction."""
    return any(
        change.revision == generation.revision and (of, step) == generation.restored
        for change, of, step in story.durables()
    )


def repeated_steps(story: Story, before: Generation, after: Generation) -> int:
    """Return the number of steps that the next generation repeats."""
    done = [step.step for step in story.steps if step.generation == before.number]
    return max(max(done, default=0) - after.restored[1], 0)


def disruptive_faults(story: Story, before: Generation, after: Generation) -> list[Fault]:
    """Return the faults during a generation that may cost it steps."""
    return story.faults_within(before.at - NEAR_S, after.at, *VIOLENT)


def i6(story: Story) -> Iterator[str]:
    """A planned reconfiguration without other faults stops at a step boundary and loses no step."""
    for before, after in pairwise(story.opened):
        if is_rollback(story, after) or disruptive_faults(story, before, after):
            continue
        yield ASKED
        if lost := repeated_steps(story, before, after):
            yield f"generation {after.number} ({after.reason}) lost {lost} steps"


def i7(story: Story) -> Iterator[str]:
    """Each step trains exactly its samples: the running hash equals the uninterrupted run's."""
    for step in story.steps:
        _, expected = story.reference.get(step.step, (0.0, ""))
        yield ASKED
        if expected and step.sample_hash != expected:
            yield f"step {step.step} of generation {step.generation} had other samples"
    for node, steps in by_node(story).items():
        for before, after in pairwise(steps):
            if before.generation == after.generation and after.step != before.step + 1:
                yield f"{node} did step {after.step} after step {before.step}"


def by_node(story: Story) -> dict[tuple[str, int], list[Step]]:
    """Return the steps of each node and generation, in order."""
    found: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in story.steps:
        found[step.node, step.generation].append(step)
    return found


def i8(story: Story) -> Iterator[str]:
    """All losses are present and equal the uninterrupted run's within the tolerance."""
    done = {step.step for step in story.steps}
    for number in range(1, story.final_step + 1):
        if number not in done or number not in story.reference:
            yield f"step {number} is not in both runs"
    if not story.final_step:
        yield "the run did not come to an end"
    for step in story.steps:
        expected, _ = story.reference.get(step.step, (step.loss, ""))
        if story.compared is not None and step.step > story.compared:
            continue
        yield ASKED
        if not abs(step.loss - expected) <= story.tolerance * abs(expected):  # True for NaN, too.
            about = f"step {step.step} of generation {step.generation}"
            yield f"{about}: the loss is {step.loss!r}, not {expected!r}"


def checksums(story: Story, wanted: Callable[[File, File], bool]) -> Iterator[str]:
    """Yield pieces of one restore point whose checksums differ between files."""
    for sample in story.samples:
        first: dict[tuple[int, int, str], list[tuple[File, str]]] = defaultdict(list)
        for file in sample.files:
            for piece, checksum in file.pieces.items():
                for other, known in first[*file.point, piece]:
                    if not wanted(file, other):
                        continue
                    yield ASKED
                    if known != checksum:
                        places = f"{file.holder} and {other.holder}"
                        yield f"piece {piece} of {file.point} is not the same on {places}"
                first[*file.point, piece].append((file, checksum))


def i9(story: Story) -> Iterator[str]:
    """All replicas of a weight are bit-equal."""
    yield from checksums(story, lambda one, other: one.rank != other.rank)


def i10(story: Story) -> Iterator[str]:
    """A replicated snapshot has the checksum of its original."""
    yield from checksums(story, lambda one, other: one.rank == other.rank)


def i11(story: Story) -> Iterator[str]:
    """The counts of samples and tokens are a function of the step."""
    rates: dict[int, tuple[int, int]] = {}
    for sample in story.samples:
        for file in sample.files:
            now = file.samples, file.label_tokens
            yield ASKED
            if rates.setdefault(file.step, now) != now:
                yield f"step {file.step} was reached with {now} and with {rates[file.step]}"
    per_step = {samples / step for step, (samples, _) in rates.items() if step}
    if len(per_step) > 1:
        yield f"the global batch changed: {sorted(per_step)}"


def i12(story: Story) -> Iterator[str]:
    """No device has worker processes of two generations at once."""
    for sample in story.samples:
        for node, pids in sample.workers.items():
            yield ASKED
            if len(pids) > story.devices:
                yield f"{node} had {len(pids)} workers on {story.devices} devices"


def i13(story: Story) -> Iterator[str]:
    """The newest complete snapshot never gets older, unless a lost node held a part of it."""
    for before, after in pairwise(story.samples):
        was, now = newest_complete(before), newest_complete(after)
        taken = story.faults_within(before.at - ALARM_S, after.at, TAKEN)
        taken += story.faults_within(0.0, after.at, END)
        opened = [g for g in story.opened if g.at <= after.at]
        # Steps beyond the restore point of a later generation are void.
        is_left = was and any(g.number > was[0] and g.restored[1] < was[1] for g in opened)
        if was is None or taken or is_left:
            continue
        yield ASKED
        if now is None or now[1] < was[1]:
            yield f"{was} was complete in memory, and then {now}"


def newest_complete(sample: Sample) -> tuple[int, int] | None:
    """Return the newest point of which every piece is in memory."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    wanted = 0
    for file in sample.files:
        found[file.point] |= set(file.pieces)
        wanted = file.keys
    return max((point for point, pieces in found.items() if len(pieces) == wanted), default=None)


def i14(story: Story) -> Iterator[str]:
    """Training continues while sailord and its store are down."""
    for fault in story.faults:
        if fault.kind not in AWAY:
            continue
        around = story.faults_within(fault.at - 2 * NEAR_S, fault.at + AWAY_S)
        if any(other is not fault and other.kind not in QUIET for other in around):
            continue
        if not is_training(story, fault.at):
            continue
        yield ASKED
        if not any(fault.at + 0.5 < step.at < fault.at + AWAY_S for step in story.steps):
            yield f"no step after fault {fault.kind!r} at {fault.at:.0f}"


def is_training(story: Story, at: float) -> bool:
    """Return whether steps ended just before that moment."""
    return any(at - 3.0 < step.at < at for step in story.steps)


def i15(story: Story) -> Iterator[str]:
    """After every fault the job is running or held within a bound, and nothing leaks."""
    yield from story.breaches
    ends = sorted(step.at for step in story.steps)
    held = [hold["at"] for hold in story.holds]
    for before, after in pairwise(ends):
        yield ASKED
        if after - before > HELD_UP_S and not any(before < at < after for at in held):
            yield f"no step for {after - before:.0f} s from {before:.0f} on"
    last = max((fault.at for fault in story.faults), default=0.0)
    if ends and last - ends[-1] > HELD_UP_S and not any(ends[-1] < at for at in held):
        yield f"no step after {ends[-1]:.0f}"
    idle = 0
    for generation in story.opened[:-1]:
        idle = 0 if story.highest(generation.number) > generation.restored[1] else idle + 1
        if idle >= SPIN:
            yield f"{idle} generations up to {generation.number} did no step"


def i16(story: Story) -> Iterator[str]:
    """A notice takes effect once: no reconfiguration drains a node that is not a member."""
    for before, after in pairwise(story.opened):
        for word in (" is draining", " is preempted"):
            name, found, rest = after.reason.partition(word)
            if not found or rest:
                continue
            yield ASKED
            names = {member.partition(".")[0] for member in before.members}
            if not names & set(name.replace(" and ", ", ").split(", ")):
                yield f"generation {after.number} drains {name}, which was no member"
    # The leader adds the node's id to an order given by name: not a second order.
    orders = [
        c for c in story.changes if "/intent/" in c.key and c.value and not c.value.get("life")
    ]
    ids = [change.key for change in orders]
    for key in {key for key in ids if ids.count(key) > 1}:
        yield f"{key} was given twice"


def i17(story: Story) -> Iterator[str]:
    """Workers survive when sailord or their agent is killed."""
    for fault in story.faults:
        if fault.kind not in QUIET:
            continue
        end = fault.at + ALARM_S
        others = story.faults_within(fault.at - 2 * NEAR_S, end)
        moved = any(fault.at - NEAR_S <= g.at <= end for g in story.generations)
        if moved or any(other.kind not in QUIET for other in others):
            continue
        before = [sample for sample in story.samples if sample.at <= fault.at][-1:]
        after = [sample for sample in story.samples if fault.at < sample.at <= end][-1:]
        for old, new in zip(before, after, strict=False):
            yield ASKED
            for node, pids in old.workers.items():
                if node in new.workers and set(pids) - set(new.workers[node]):
                    yield f"workers of {node} ended after fault {fault.kind!r} at {fault.at:.0f}"


def i18(story: Story) -> Iterator[str]:
    """Machine losses do not count as failures: the job neither fails nor is held for them."""
    for change in story.changes:
        is_state = change.key.endswith(f"job/{story.job}/state") and change.value is not None
        if is_state:
            yield ASKED
        if is_state and change.value["state"] == "failed":
            yield f"the job failed: {change.value['reason']}"
    for (_, before), (at, now) in pairwise(story.failures):
        disrupted = story.faults_within(at - 2 * NEAR_S, at)
        yield ASKED
        if now > before and disrupted and all(f.kind in (TAKEN, *PREEMPTIONS) for f in disrupted):
            what = ", ".join(f"{fault.kind} {' '.join(fault.nodes)}" for fault in disrupted)
            yield f"{what} counted as a failure of the job's own"
    for hold in story.holds:
        if "are needed for a snapshot" in hold["reason"]:
            continue  # A full memory folder needs an operator: the job may be held.
        if "attempt" in hold["reason"] or "times" in hold["reason"]:
            yield f"the job was held: {hold['reason']}"


def i19(story: Story) -> Iterator[str]:
    """The job's cost stays below its limit."""
    for change in story.changes:
        if not change.key.endswith(f"job/{story.job}/state") or change.value is None:
            continue
        bill = change.value["bill"]
        yield ASKED
        rates = [g.usd_per_hour or 0.0 for g in story.generations]
        margin = max(rates, default=0.0) * NEAR_S / 3600
        if bill["usd_max"] is not None and bill["usd"] > bill["usd_max"] + margin:
            yield f"{bill['usd']:.2f} USD of {bill['usd_max']:.2f} are spent"


def i20(story: Story) -> Iterator[str]:
    """Every reconfiguration has a timing record with measured and predicted phases."""
    for move in story.moves:
        phases = dict(move["phases"])
        yield ASKED
        missing = PREDICTED - phases.keys()
        if missing:
            yield f"generation {move['generation']}: not measured: {', '.join(sorted(missing))}"
        if move["predicted_s"] is None:
            yield f"generation {move['generation']}: nothing was predicted"
        if move["predicted_s"] and not dict(move["predicted"]).keys() >= PREDICTED:
            yield f"generation {move['generation']}: not all phases were predicted"
    timed = {move["generation"] for move in story.moves}
    # Nothing is recorded between two leaders, however short the gap.
    led = [c.at for c in story.changes if c.key.endswith("/leader")]
    led += [fault.at for fault in story.faults if fault.kind in OF_SAILORD]
    for generation in story.opened:
        steps = [step.at for step in story.steps if step.generation == generation.number]
        # A generation may end before its timing is stored; a dead leader loses what it measured.
        if generation.number in timed or not steps or max(steps) - min(steps) < TIMED_S:
            continue
        if generation.number < min(timed, default=0):
            continue  # A job's history is bounded: that of a long job lacks the first ones.
        if not any(generation.at < at < min(steps) + NEAR_S for at in led):
            yield f"generation {generation.number}: no reconfiguration timing was recorded"


RULES: dict[str, Rule] = {
    rule.__name__.upper(): rule
    for rule in (
        *(i1, i2, i3, i4, i5, i6, i7, i8, i9, i10),
        *(i11, i12, i13, i14, i15, i16, i17, i18, i19, i20),
    )
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a story against all rules."""

    violations: tuple[str, ...]
    """Every violation; empty if the story is sound."""
    asked: Mapping[str, int]
    """How often each rule applied. A rule that never did has tested nothing."""

    @property
    def idle(self) -> list[str]:
        """Rules that never applied."""
        return [name for name, count in self.asked.items() if not count]


def judge(story: Story) -> Verdict:
    """Check a story against every rule."""
    said = {name: Counter(rule(story)) for name, rule in RULES.items()}
    return Verdict(
        tuple(f"{name}: {text}" for name, found in said.items() for text in sorted(found) if text),
        {name: found[ASKED] for name, found in said.items()},
    )
