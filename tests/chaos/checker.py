"""I1 to I20 of the protocol, each as a rule that says what in a story breaks it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.story import Fault, File, Generation, Sample, Step, Story

Rule = Callable[[Story], Iterator[str]]
ASKED = ""
"""What a rule yields each time that it applies, before it says what is wrong there, if anything."""

TAKEN = "taken"
"""A machine goes at that moment, with its memory, whatever was said before."""
END = "end"
"""The job is ended, and what it holds is given back."""
PREEMPTIONS = ("node", "node and back", "notice", "doubled notice", "no notice", "drain", "swap")
"""Faults of which a machine that goes is all."""
VIOLENT = (
    *(TAKEN, "rank", "stop rank", "stop node", "full memory", "stop agent", "point"),
    # Agents may be away for longer than a lease.
    *("agent", "all agents", "everybody in charge"),
    # Who is not reached counts as lost, and so does a node whose clock nobody believes.
    *("partition", "one way", "slow link", "resets", "sailord cut", "slow store", "clock"),
)
"""Faults after which a move need not be a planned one."""
QUIET = (
    *("agent", "all agents", "sailord", "sailord away", "everybody in charge", "stop sailord"),
    *("store away", "store member", "stop member"),
)
"""Faults that workers must not notice."""
AWAY = ("sailord away", "store away")
OF_SAILORD = ("sailord", "sailord away", "everybody in charge", "stop sailord")
OF_RANKS = ("rank", "stop rank")
"""Faults that leave a machine's memory, and the agent that gives it out, as they are."""
NEAR_S = 15.0
"""A fault shows within so long."""
HELD_UP_S = 60.0
"""Nothing may stand still for longer. By the protocol it might be five times the sum of the
phases' deadlines, which is twenty minutes with the usual options: no storm would ever find that."""
SPIN = 8
"""So many generations in a row that do no step: a job is held after five failures of its own."""
AWAY_S = 5.0
ALARM_S = 3.0
PREDICTED = {"detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"}
"""The phases of a move, which are measured and predicted."""
TOLD_S = 5.0
"""A move is told of so long after its first step."""


def i1(story: Story) -> Iterator[str]:
    """One effective leader: a record's term is that of the leader at that moment."""
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
    """Numbers grow by one, and each means one plan, one restore point, one set of members."""
    for before, after in pairwise(story.generations):
        yield ASKED
        if after.number == before.number:
            if after.what != before.what:
                yield f"generation {after.number} became another one"
        elif after.number != before.number + 1:
            yield f"generation {after.number} comes after {before.number}"


def i3(story: Story) -> Iterator[str]:
    """What a generation writes after the next one is opened does not count."""
    number = 0
    durables = {change.revision: generation for change, generation, _ in story.durables()}
    opened = {generation.revision: generation.number for generation in story.generations}
    lowered = set(opened)  # Going back and opening are one transaction.
    for revision in sorted({*durables, *opened}):
        number = opened.get(revision, number)
        of = durables.get(revision)
        yield ASKED
        if of is not None and of != number and revision not in lowered:
            yield f"a checkpoint of generation {of} began to count under generation {number}"
    for generation in story.opened:
        of, step = generation.restored
        # The step in doubt is sealed by survivors who never reported it.
        if of and step > story.highest(of) + 1:
            yield f"generation {generation.number} begins at step {step}, which {of} never did"
        if of >= generation.number:
            yield f"generation {generation.number} begins from generation {of}"


def i4(story: Story) -> Iterator[str]:
    """The durable step never goes back, and each checkpoint is whole, to the last byte."""
    back = {
        generation.revision for generation in story.opened if is_ordered_back(story, generation)
    }
    for (_, _, before), (change, _, after) in pairwise(story.durables()):
        yield ASKED
        if after < before and change.revision not in back:
            yield f"revision {change.revision}: step {after} is durable after step {before}"
    for commit in story.commits:
        yield ASKED
        for fault in commit["faults"]:
            yield f"step {commit['step']}: {fault}"


def i5(story: Story) -> Iterator[str]:
    """No less than what was durable is restored; one lost node costs one interval at most."""
    for before, after in pairwise(story.opened):
        step = after.restored[1]
        durable = next(
            (s for c, _, s in reversed(story.durables()) if c.revision < after.revision), 0
        )
        if is_ordered_back(story, after):
            continue
        yield ASKED
        if step < durable:
            yield f"generation {after.number} begins at step {step}, and {durable} was durable"
        lost = lost_by(story, before, after)
        struck = violence(story, before, after)
        domains = {name for f in struck for name in f.nodes}
        # The newest snapshot may be on its way to the buddy, still, where the machine or its agent
        # is gone for so long that it counts as lost.
        is_sent = any(f.kind not in OF_RANKS for f in struck)
        if len(domains) == 1 and lost > story.memory_every + is_sent:
            yield f"generation {after.number} lost {lost} steps with {', '.join(domains)}"


def is_ordered_back(story: Story, generation: Generation) -> bool:
    """An operator had the job go back: the durable step was set with the generation, in one."""
    return any(
        change.revision == generation.revision and (of, step) == generation.restored
        for change, of, step in story.durables()
    )


def lost_by(story: Story, before: Generation, after: Generation) -> int:
    """Steps that a generation had done and the next one does again."""
    done = [step.step for step in story.steps if step.generation == before.number]
    return max(max(done, default=0) - after.restored[1], 0)


def violence(story: Story, before: Generation, after: Generation) -> list[Fault]:
    """What was done to nodes in a generation's life that it need not have survived."""
    return story.faults_within(before.at - NEAR_S, after.at, *VIOLENT)


def i6(story: Story) -> Iterator[str]:
    """Where no machine was gone yet and nothing else was struck, all stopped at one boundary."""
    for before, after in pairwise(story.opened):
        if is_ordered_back(story, after) or violence(story, before, after):
            continue
        yield ASKED
        if lost := lost_by(story, before, after):
            yield f"generation {after.number} ({after.reason}) lost {lost} steps"


def i7(story: Story) -> Iterator[str]:
    """Each step has just its samples: the hash of all so far is the uninterrupted run's."""
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
    """Each node's steps of each generation, in their order."""
    found: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in story.steps:
        found[step.node, step.generation].append(step)
    return found


def i8(story: Story) -> Iterator[str]:
    """The losses are the uninterrupted run's, as near as the job's numbers are, and all there."""
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
        if not abs(step.loss - expected) <= story.tolerance * abs(expected):  # Also what is NaN.
            about = f"step {step.step} of generation {step.generation}"
            yield f"{about}: the loss is {step.loss!r}, not {expected!r}"


def checksums(story: Story, wanted: Callable[[File, File], bool]) -> Iterator[str]:
    """Pieces of one point that are not the same in two files."""
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
    """All ranks that hold a weight hold the same bits."""
    yield from checksums(story, lambda one, other: one.rank != other.rank)


def i10(story: Story) -> Iterator[str]:
    """A copy has the checksum of what it was copied from."""
    yield from checksums(story, lambda one, other: one.rank == other.rank)


def i11(story: Story) -> Iterator[str]:
    """Samples and tokens so far are a function of the step."""
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
    """No device has two processes at once."""
    for sample in story.samples:
        for node, pids in sample.workers.items():
            yield ASKED
            if len(pids) > story.devices:
                yield f"{node} had {len(pids)} workers on {story.devices} devices"


def i13(story: Story) -> Iterator[str]:
    """What could be gone back to is never older than before, unless a node took it away."""
    for before, after in pairwise(story.samples):
        was, now = newest_complete(before), newest_complete(after)
        taken = story.faults_within(before.at - ALARM_S, after.at, TAKEN)
        taken += story.faults_within(0.0, after.at, END)
        opened = [g for g in story.opened if g.at <= after.at]
        # What a generation did beyond the point from which a later one began is void.
        is_left = was and any(g.number > was[0] and g.restored[1] < was[1] for g in opened)
        if was is None or taken or is_left:
            continue
        yield ASKED
        if now is None or now[1] < was[1]:
            yield f"{was} was complete in memory, and then {now}"


def newest_complete(sample: Sample) -> tuple[int, int] | None:
    """The newest point of which every piece is there."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    wanted = 0
    for file in sample.files:
        found[file.point] |= set(file.pieces)
        wanted = file.keys
    return max((point for point, pieces in found.items() if len(pieces) == wanted), default=None)


def i14(story: Story) -> Iterator[str]:
    """Steps go on while sailord and its store are away."""
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
            yield f"no step was done from {fault.kind} on, at {fault.at:.0f}"


def is_training(story: Story, at: float) -> bool:
    """Did steps end just before that moment?"""
    return any(at - 3.0 < step.at < at for step in story.steps)


def i15(story: Story) -> Iterator[str]:
    """Everything ends in running or held within a bound, and nothing is left behind."""
    yield from story.breaches
    ends = sorted(step.at for step in story.steps)
    held = [hold["at"] for hold in story.holds]
    for before, after in pairwise(ends):
        yield ASKED
        if after - before > HELD_UP_S and not any(before < at < after for at in held):
            yield f"no step for {after - before:.0f} s from {before:.0f} on"
    last = max((fault.at for fault in story.faults), default=0.0)
    if ends and last - ends[-1] > HELD_UP_S and not any(ends[-1] < at for at in held):
        yield f"no step any more from {ends[-1]:.0f} on"
    idle = 0
    for generation in story.opened[:-1]:
        idle = 0 if story.highest(generation.number) > generation.restored[1] else idle + 1
        if idle >= SPIN:
            yield f"{idle} generations up to {generation.number} did no step"


def i16(story: Story) -> Iterator[str]:
    """A notice has one effect: nobody moves off a node that is no member any more."""
    for before, after in pairwise(story.opened):
        name, _, rest = after.reason.partition(" is draining")
        if after.reason.endswith(" is draining") and not rest:
            yield ASKED
            names = {member.partition(".")[0] for member in before.members}
            if not names & set(name.replace(" and ", ", ").split(", ")):
                yield f"generation {after.number} moves off {name}, which had no part"
    # A leader that hears of a name writes down whom it meant: that is no second order.
    orders = [
        c for c in story.changes if "/intent/" in c.key and c.value and not c.value.get("life")
    ]
    ids = [change.key for change in orders]
    for key in {key for key in ids if ids.count(key) > 1}:
        yield f"{key} was given twice"


def i17(story: Story) -> Iterator[str]:
    """Workers live on when those who look after them are killed."""
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
                    yield f"workers of {node} ended as {fault.kind} was struck at {fault.at:.0f}"


def i18(story: Story) -> Iterator[str]:
    """Losses of machines are nobody's bug: the job is not given up for them."""
    for change in story.changes:
        is_state = change.key.endswith(f"job/{story.job}/state") and change.value is not None
        if is_state:
            yield ASKED
        if is_state and change.value["state"] == "failed":
            yield f"the job failed: {change.value['reason']}"
    for (_, before), (at, now) in pairwise(story.failures):
        struck = story.faults_within(at - 2 * NEAR_S, at)
        yield ASKED
        if now > before and struck and all(f.kind in (TAKEN, *PREEMPTIONS) for f in struck):
            what = ", ".join(f"{fault.kind} {' '.join(fault.nodes)}" for fault in struck)
            yield f"{what} counted as a failure of the job's own"
    for hold in story.holds:
        if "are needed for a snapshot" in hold["reason"]:
            continue  # A folder that is full is nobody's loss: somebody must look.
        if "attempt" in hold["reason"] or "times" in hold["reason"]:
            yield f"the job was held: {hold['reason']}"


def i19(story: Story) -> Iterator[str]:
    """No more money is spent than was allowed."""
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
    """What each move took stands beside what was predicted."""
    for move in story.moves:
        phases = dict(move["phases"])
        yield ASKED
        missing = PREDICTED - phases.keys()
        if missing:
            yield f"generation {move['generation']}: nobody says {', '.join(sorted(missing))}"
        if move["predicted_s"] is None:
            yield f"generation {move['generation']}: nothing was predicted"
        if move["predicted_s"] and not dict(move["predicted"]).keys() >= PREDICTED:
            yield f"generation {move['generation']}: not all phases were predicted"
    told = {move["generation"] for move in story.moves}
    # Between two leaders nobody notes what he sees, however soon the other one is there.
    led = [c.at for c in story.changes if c.key.endswith("/leader")]
    led += [fault.at for fault in story.faults if fault.kind in OF_SAILORD]
    for generation in story.opened:
        steps = [step.at for step in story.steps if step.generation == generation.number]
        # One may end before it is told of, and a leader takes what it saw with it.
        if generation.number in told or not steps or max(steps) - min(steps) < TOLD_S:
            continue
        if generation.number < min(told, default=0):
            continue  # The history of a job has an end: the first moves of a long one fell out.
        if not any(generation.at < at < min(steps) + NEAR_S for at in led):
            yield f"nobody says what the move to generation {generation.number} took"


RULES: dict[str, Rule] = {
    rule.__name__.upper(): rule
    for rule in (
        *(i1, i2, i3, i4, i5, i6, i7, i8, i9, i10),
        *(i11, i12, i13, i14, i15, i16, i17, i18, i19, i20),
    )
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules make of a story."""

    violations: tuple[str, ...]
    """All that is wrong; none: nothing is."""
    asked: Mapping[str, int]
    """How often each rule applied. One that never did has shown nothing."""

    @property
    def idle(self) -> list[str]:
        """Rules that never applied."""
        return [name for name, count in self.asked.items() if not count]


def judge(story: Story) -> Verdict:
    """Ask every rule."""
    said = {name: Counter(rule(story)) for name, rule in RULES.items()}
    return Verdict(
        tuple(f"{name}: {text}" for name, found in said.items() for text in sorted(found) if text),
        {name: found[ASKED] for name, found in said.items()},
    )
