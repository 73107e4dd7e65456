"""Chooses what to measure next, between which nodes, within the budget.

Sites are measured, not nodes: of thousands of nodes a few of each site take part, in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sailord.network.core.model import (
    GENTLE_BYTES,
    SIZES_BYTES,
    Candidate,
    CurveToMeasure,
    Failure,
    Measurement,
    NetworkPolicy,
    NextMeasurement,
    Site,
)

FLOWS_MAX = 8
HOUR_S = 3600.0
RETRY_S = 10.0
"""Pause after a failure of a pair of nodes or an answer that is not believed; it doubles each
time."""
RETRY_S_MAX = 600.0
"""The longest such pause."""
PARTNERS = 6
"""Nodes of each end that are considered for one question."""
LOOK_S, LOOK_TRAINING_S = 0.25, 2.0
"""How long nodes look at their traffic first; one that trains is silent within a step."""
FLAGGED_MAX = 3
"""Answers to one question that are not believed, after which a round goes on without it."""
BYTES_MAX, BYTES_MAX_ORDERED = 400 << 20, 4 << 30
"""Of one measurement on schedule, and of an ordered one."""


@dataclass(frozen=True, slots=True)
class PastMeasurements:
    """What was measured so far, and what went wrong."""

    good: Sequence[Measurement] = ()
    """Without those that were flagged."""
    failures: Sequence[Failure] = ()
    flagged: Sequence[Measurement] = ()
    liars: frozenset[str] = frozenset()
    """Nodes whose reports are not used, and which are not asked again."""
    too_fast: frozenset[tuple[Site, Site]] = frozenset()
    """Links that TCP between agents cannot fill, and which are not measured."""


def open_questions(
    candidates: Iterable[Candidate],
    known: PastMeasurements,
    policy: NetworkPolicy,
    now: float,
    *,
    since: float | None = None,
) -> list[CurveToMeasure]:
    """Return the questions without enough fresh answers, the least answered first.

    ``since``: when a round was ordered, which wants one newer answer to each; ``None``: on
    schedule.
    """
    return [question for question, _ in _find_open(candidates, known, policy, now, since)]


def _find_open(
    candidates: Iterable[Candidate],
    known: PastMeasurements,
    policy: NetworkPolicy,
    now: float,
    since: float | None,
) -> list[tuple[CurveToMeasure, set[tuple[str, str]]]]:
    """Return open questions, each with the pairs of nodes that have answered it."""
    sites = _by_site(candidates, known.liars)
    fresh_at = now - policy.fresh_hours * HOUR_S if since is None else since
    pairs: defaultdict[CurveToMeasure, set[tuple[str, str]]] = defaultdict(set)
    newest: dict[CurveToMeasure, float] = {}
    for each in known.good:
        newest[each.question] = max(each.at, newest.get(each.question, 0.0))
        if each.at >= fresh_at:
            pairs[each.question].add((each.sender, each.receiver))
    doubted = Counter(each.question for each in known.flagged if each.at >= fresh_at)
    if since is not None:
        # Agents that contradict each other are not asked forever in one round.
        for question, count in doubted.items():
            if count >= FLAGGED_MAX:
                pairs[question].add(("", ""))
    found = []
    for question in _questions(sites):
        if (question.sender, question.receiver) in known.too_fast:
            continue
        wanted = min(policy.pairs, _pair_count(question, sites)) if since is None else 1
        if len(pairs[question]) < wanted:
            answers = len(pairs[question]) + doubted[question]
            found.append((answers, newest.get(question, 0.0), question))
    return [(question, pairs[question]) for *_, question in sorted(found)]


def choose(
    candidates: Sequence[Candidate],
    known: PastMeasurements,
    policy: NetworkPolicy,
    now: float,
    *,
    since: float | None = None,
) -> NextMeasurement | None:
    """Return the next measurement; ``None``: nothing is due, or nothing can be measured now."""
    if since is None and not _has_budget(known, policy, now):
        return None
    bytes_max = BYTES_MAX if since is None else BYTES_MAX_ORDERED
    sites = _by_site(candidates, known.liars)
    used = _last_used(known)
    waits = _blocked_until(known)
    for question, done in _find_open(candidates, known, policy, now, since):
        pair = _pair(question, done, sites, used, waits, now)
        if pair is not None:
            gentle = any(node.is_training for node in pair)
            sizes = tuple(s for s in SIZES_BYTES if not gentle or s <= GENTLE_BYTES)
            look_s = LOOK_TRAINING_S if gentle else LOOK_S
            return NextMeasurement(pair[0].id, pair[1].id, question, sizes, bytes_max, look_s)
    return None


def _by_site(candidates: Iterable[Candidate], liars: frozenset[str]) -> dict[Site, list[Candidate]]:
    sites: defaultdict[Site, list[Candidate]] = defaultdict(list)
    for each in candidates:
        if each.id not in liars:
            sites[each.site].append(each)
    return dict(sites)


def _questions(sites: Mapping[Site, Sequence[Candidate]]) -> Iterator[CurveToMeasure]:
    for sender, some in sites.items():
        for receiver, others in sites.items():
            if sender == receiver and len(some) < 2:
                continue
            gpus = min(max(node.gpus for node in some), max(node.gpus for node in others))
            flows = 1
            while flows <= min(gpus, FLOWS_MAX):
                yield CurveToMeasure(sender, receiver, flows)
                flows *= 2
            if sender <= receiver:
                yield CurveToMeasure(sender, receiver, both_ways=True)


def _pair_count(question: CurveToMeasure, sites: Mapping[Site, Sequence[Candidate]]) -> int:
    senders, receivers = len(sites[question.sender]), len(sites[question.receiver])
    return senders * (receivers - (question.sender == question.receiver))


def _has_budget(known: PastMeasurements, policy: NetworkPolicy, now: float) -> bool:
    """Return whether what is left of the hour's seconds and bytes suffices for a measurement."""
    last_hour = [each for each in (*known.good, *known.flagged) if each.at > now - HOUR_S]
    seconds = sum(each.took_s for each in last_hour)
    seconds += sum(each.took_s for each in known.failures if each.at > now - HOUR_S)
    moved = sum(each.bytes_moved for each in last_hour)
    has_seconds = seconds + policy.seconds_each <= policy.seconds_per_hour
    return has_seconds and moved + BYTES_MAX <= policy.mbytes_per_hour * 1e6


def _last_used(known: PastMeasurements) -> dict[str, float]:
    used: dict[str, float] = {}
    asked = [(each.at, each.sender, each.receiver) for each in (*known.good, *known.flagged)]
    asked += [(each.at, each.sender, each.receiver) for each in known.failures]
    for at, *nodes in asked:
        for node in nodes:
            used[node] = max(at, used.get(node, 0.0))
    return used


def _blocked_until(known: PastMeasurements) -> dict[tuple[str, str], float]:
    """Return when pairs of nodes are tried again whose last answers failed or are not believed."""
    worked: dict[tuple[str, str], float] = {}
    for each in known.good:
        pair = each.sender, each.receiver
        worked[pair] = max(each.at, worked.get(pair, 0.0))
    bad = [(each.at, (each.sender, each.receiver)) for each in known.flagged]
    bad += [(each.at, (each.sender, each.receiver)) for each in known.failures]
    counts, last = Counter[tuple[str, str]](), dict[tuple[str, str], float]()
    for at, pair in bad:
        if at > worked.get(pair, 0.0):
            counts[pair] += 1
            last[pair] = max(at, last.get(pair, 0.0))
    return {
        pair: last[pair] + min(RETRY_S * 2.0 ** min(count - 1, 10), RETRY_S_MAX)
        for pair, count in counts.items()
    }


def _pair(
    question: CurveToMeasure,
    done: set[tuple[str, str]],
    sites: Mapping[Site, Sequence[Candidate]],
    used: Mapping[str, float],
    waits: Mapping[tuple[str, str], float],
    now: float,
) -> tuple[Candidate, Candidate] | None:
    """Return two nodes: not training if possible, then those that were used longest ago."""

    def rank(node: Candidate) -> tuple[bool, float, str]:
        return node.is_training, used.get(node.id, 0.0), node.id

    ends = [
        sorted((n for n in sites[site] if n.gpus >= question.flows), key=rank)[:PARTNERS]
        for site in (question.sender, question.receiver)
    ]
    pairs = [
        (sender, receiver)
        for sender in ends[0]
        for receiver in ends[1]
        if sender.id != receiver.id
        and (sender.id, receiver.id) not in done
        and waits.get((sender.id, receiver.id), 0.0) <= now
    ]
    return min(
        pairs,
        key=lambda pair: (
            pair[0].is_training + pair[1].is_training,
            max(used.get(node.id, 0.0) for node in pair),
            rank(pair[0]),
            rank(pair[1]),
        ),
        default=None,
    )
