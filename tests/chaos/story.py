"""A recorded run as the checker reads it: store changes, processes, snapshots, faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """One key's change in the store."""

    revision: int
    at: float
    key: str
    created: int = 0
    value: Any = None
    """``None``: the key was deleted."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line that a worker wrote at the end of a step."""

    node: str
    generation: int
    step: int
    at: float
    loss: float
    sample_hash: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected into the cluster."""

    at: float
    kind: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class File:
    """A sealed snapshot file in some node's memory."""

    holder: str
    writer: str
    rank: int
    generation: int
    step: int
    keys: int
    """The number of pieces of the whole state."""
    pieces: Mapping[str, str]
    samples: int
    label_tokens: int

    @property
    def point(self) -> tuple[int, int]:
        return self.generation, self.step


@dataclass(frozen=True, slots=True)
class Sample:
    """The worker processes and snapshot files at one moment."""

    at: float
    workers: Mapping[str, tuple[tuple[int, int], ...]]
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A record of a generation, as it was written to the store."""

    at: float
    revision: int
    number: int
    state: str
    plan: str
    members: tuple[str, ...]
    restored: tuple[int, int]
    """Generation and step."""
    source: str
    term: int
    reason: str
    usd_per_hour: float | None

    @property
    def what(self) -> tuple[object, ...]:
        return self.plan, self.members, self.restored, self.source


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that was recorded of one run."""

    job: str
    changes: tuple[Change, ...]
    steps: tuple[Step, ...]
    reference: Mapping[int, tuple[float, str]]
    """Loss and sample hash of each step of the uninterrupted run."""
    final_step: int
    faults: tuple[Fault, ...] = ()
    samples: tuple[Sample, ...] = ()
    commits: tuple[Mapping[str, Any], ...] = ()
    """The faults found on reading each checkpoint when it was committed."""
    moves: tuple[Mapping[str, Any], ...] = ()
    holds: tuple[Mapping[str, Any], ...] = ()
    failures: tuple[tuple[float, int], ...] = ()
    """Time and value of each change of sailord's count of failed attempts in a row."""
    breaches: tuple[str, ...] = ()
    """Violations that the storm itself found: processes that ended, leaks."""
    tolerance: float = 0.0
    """The largest relative deviation of a loss from the uninterrupted run's."""
    compared: int | None = None
    """The last step whose loss is compared; ``None``: all are."""
    memory_every: int = 1
    devices: int = 1
    """Devices of each node."""

    @property
    def generations(self) -> list[Generation]:
        """Return every generation record that was written, in order."""
        return list(self._generations())

    def _generations(self) -> Iterator[Generation]:
        for change in self.changes:
            if change.key.endswith(f"job/{self.job}/gen") and change.value is not None:
                said, point = change.value, change.value["restore"]["point"]
                yield Generation(
                    change.at,
                    change.revision,
                    said["number"],
                    said["state"],
                    said["plan"],
                    tuple(said["members"]),
                    (point["generation"], point["step"]),
                    said["restore"]["source"],
                    said["term"],
                    said["reason"],
                    said["usd_per_hour"],
                )

    @property
    def opened(self) -> list[Generation]:
        """Return the first record of each generation."""
        found: dict[int, Generation] = {}
        for generation in self.generations:
            found.setdefault(generation.number, generation)
        return list(found.values())

    def durables(self) -> list[tuple[Change, int, int]]:
        """Return each change of the durable checkpoint, with its generation and step."""
        return [
            (change, change.value["point"]["generation"], change.value["point"]["step"])
            for change in self.changes
            if change.key.endswith(f"job/{self.job}/durable") and change.value is not None
        ]

    def highest(self, generation: int) -> int:
        """Return the last step that a generation did; 0 if it did none."""
        return max((step.step for step in self.steps if step.generation == generation), default=0)

    def faults_within(self, begin: float, end: float, *kinds: str) -> list[Fault]:
        """Return the faults between two moments."""
        return [f for f in self.faults if begin <= f.at <= end and (not kinds or f.kind in kinds)]


def read_story(folder: Path) -> Story:
    """Read the story that ``Recorder`` wrote into a folder."""
    about = json.loads((folder / "about.json").read_text())
    final = folder / "final.json"
    reference = {line["step"] + 1: line for line in _lines(folder / "reference.jsonl")}
    steps = sorted(_lines(folder / "steps.jsonl"), key=lambda line: line["at"])
    known = ("node", "generation", "step", "at", "loss", "sample_hash")
    return Story(
        job=about["job"],
        tolerance=about["tolerance"],
        compared=about["compared"],
        changes=tuple(Change(**line) for line in _lines(folder / "changes.jsonl")),
        steps=tuple(Step(**{key: line[key] for key in known}) for line in steps),
        reference={step: (line["loss"], line["sample_hash"]) for step, line in reference.items()},
        final_step=json.loads(final.read_text())["step"] if final.exists() else 0,
        faults=tuple(
            Fault(line["at"], line["kind"], tuple(line["nodes"]))
            for line in _lines(folder / "faults.jsonl")
        ),
        samples=tuple(map(_sample, _lines(folder / "samples.jsonl"))),
        commits=tuple(_lines(folder / "commits.jsonl")),
        moves=tuple(json.loads((folder / "moves.json").read_text())["moves"]),
        holds=tuple(_lines(folder / "holds.jsonl")),
        failures=tuple((line["at"], line["count"]) for line in _lines(folder / "failures.jsonl")),
        breaches=tuple(line["text"] for line in _lines(folder / "breaches.jsonl")),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)


def _sample(line: Mapping[str, Any]) -> Sample:
    workers = {name: tuple(map(tuple, pids)) for name, pids in line["workers"].items()}
    return Sample(line["at"], workers, tuple(File(**each) for each in line["snapshots"]))
