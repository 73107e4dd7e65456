"""Model check of the commit protocol: no interleaving, within bounds, commits half a checkpoint.

Two controllers that may both believe they lead, two workers that may belong to a generation that
is over, three generations, two steps. A worker uploads its part of a step and votes; a leader
that has the votes of all parts makes one transaction; garbage is removed meanwhile. All orders of
these events are tried. Each rule of the protocol can be dropped, and then something breaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

WORKERS = ("a", "b")
"""Each holds one half of the state."""
GENERATIONS = 3
STEPS = 2
TERMS = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol's rules; a test drops them one at a time."""

    fences: bool = True
    """A commit compares the leader's term and the generation, in the same transaction."""
    immutable_names: bool = True
    """Object names carry generation, step and writer, so that no writer overwrites another's."""
    coverage: bool = True
    """All parts must have voted."""
    careful_garbage: bool = True
    """Garbage collection keeps everything that a live generation may still commit."""


RULES = Rules()

Name = tuple[int, int, str]
"""Generation (0 where names do not tell it), step, writer."""


@dataclass(frozen=True, slots=True)
class Durable:
    step: int
    generation: int
    objects: tuple[tuple[Name, int], ...]
    """What the manifest names, and the generation whose content it expects there."""


@dataclass(frozen=True, slots=True)
class State:
    """The store, the objects, and what each party believes."""

    term: int = 1
    generation: int = 1
    durable: Durable | None = None
    objects: frozenset[tuple[Name, int]] = frozenset()
    """Object names, each with the generation that wrote its content."""
    believed: tuple[int, int] = (1, 0)
    """The term in which each controller believes that it leads; 0: it does not."""
    workers: tuple[int, int] = (1, 1)
    """The generation that each worker takes part in; it may be over."""
    votes: frozenset[Name] = frozenset()
    """Who voted for having uploaded what: generation, step, writer. Votes reach both leaders."""


def transitions(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Everything that may happen next."""
    yield from _elections(state)
    yield from _generations(state, rules)
    for index, worker in enumerate(WORKERS):
        yield from _worker_transitions(state, index, worker, rules)
    yield from _commits(state, rules)
    yield from _garbage(state, rules)


def _elections(state: State) -> Iterator[tuple[str, State]]:
    """The other controller takes the lease; the first may not have noticed yet."""
    if state.term < TERMS:
        other = 1 - state.believed.index(max(state.believed))
        believed = tuple(state.term + 1 if i == other else t for i, t in enumerate(state.believed))
        yield (
            f"controller {other} is elected",
            replace(state, term=state.term + 1, believed=believed),
        )


def _generations(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    for index, term in enumerate(state.believed):
        leads = term == state.term if rules.fences else term > 0
        if leads and state.generation < GENERATIONS:
            opened = replace(state, generation=state.generation + 1)
            yield f"controller {index} opens generation {opened.generation}", opened


def _worker_transitions(
    state: State, index: int, worker: str, rules: Rules
) -> Iterator[tuple[str, State]]:
    mine = state.workers[index]
    if mine < state.generation:
        joined = tuple(state.generation if i == index else g for i, g in enumerate(state.workers))
        yield f"{worker} joins generation {state.generation}", replace(state, workers=joined)
    for step in range(1, STEPS + 1):
        vote = (mine, step, worker)
        name = (mine if rules.immutable_names else 0, step, worker)
        if vote not in state.votes:
            kept = frozenset(entry for entry in state.objects if entry[0] != name)
            uploaded = replace(state, objects=kept | {(name, mine)}, votes=state.votes | {vote})
            yield f"{worker} of generation {mine} uploads step {step}", uploaded


def _commits(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    for index, term in enumerate(state.believed):
        for generation in range(1, GENERATIONS + 1):
            for step in range(1, STEPS + 1):
                voted = [w for w in WORKERS if (generation, step, w) in state.votes]
                if term == 0 or not voted or (rules.coverage and len(voted) < len(WORKERS)):
                    continue
                # The transaction: all of it, or nothing.
                if rules.fences and (term != state.term or generation != state.generation):
                    continue
                if state.durable is not None and state.durable.step >= step:
                    continue
                name_generation = generation if rules.immutable_names else 0
                named = tuple(((name_generation, step, w), generation) for w in voted)
                durable = Durable(step, generation, named)
                text = f"controller {index} commits step {step} of generation {generation}"
                yield text, replace(state, durable=durable)


def _garbage(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Remove objects that no manifest names and that can no longer be committed."""
    named = {name for name, _ in state.durable.objects} if state.durable else set()
    gone = set()
    for name, generation in state.objects:
        is_old = state.durable is not None and name[1] < state.durable.step
        is_dead = generation < state.generation
        if name not in named and (is_old or is_dead or not rules.careful_garbage):
            gone.add((name, generation))
    if gone:
        yield f"{len(gone)} objects are removed", replace(state, objects=state.objects - gone)


def broken_invariant(before: State, after: State) -> str:
    """Return the invariant that the transition broke; empty if none."""
    durable = after.durable
    if durable is None:
        return ""
    if before.durable is not None and durable.step < before.durable.step:
        return "the durable step went back"
    if durable != before.durable and durable.generation != after.generation:
        return "a write by a generation counts after the next one was opened"
    writers = [name[2] for name, _ in durable.objects]
    if sorted(writers) != sorted(WORKERS):
        return "the committed checkpoint does not cover every part exactly once"
    objects = dict(after.objects)
    for name, generation in durable.objects:
        if objects.get(name) != generation:
            return "the committed checkpoint does not hold what its manifest says"
    return ""


def explore(rules: Rules) -> tuple[int, tuple[str, ...] | None]:
    """All states that can be reached, or the shortest path to a broken invariant."""
    start = State()
    paths: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for text, following in transitions(state, rules):
            broken = broken_invariant(state, following)
            if broken:
                return len(paths), (*_path(paths, state), text, broken)
            if following not in paths:
                paths[following] = (state, text)
                queue.append(following)
    return len(paths), None


def _path(paths: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    found = []
    previous = paths[state]
    while previous is not None:
        state, text = previous
        found.append(text)
        previous = paths[state]
    return tuple(reversed(found))


@pytest.mark.slow
def test_any_interleaving_keeps_committed_checkpoints_whole() -> None:
    states, path = explore(RULES)
    assert path is None, "\n".join(path or ())
    # The bounds are wide enough to mean something: zombies, two leaders, garbage, all of it.
    assert states > 10_000


@pytest.mark.parametrize("dropped", ["fences", "immutable_names", "coverage", "careful_garbage"])
def test_dropping_any_rule_breaks_the_protocol(dropped: str) -> None:
    _, path = explore(replace(RULES, **{dropped: False}))
    assert path is not None, f"without {dropped} nothing breaks"
    assert len(path) <= 9, path
