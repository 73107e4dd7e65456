"""Every kind of record and message, with an example of each that has all its fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from agents.protocol import codec, link_records, records
from agents.saved_state import SavedState
from agents.store import interface
from agents.workers.status import WorkerStatus
from sailord.capacity.core.model import CapacityRecord
from sailord.checkpoints.manifest import Manifest
from sailord.cluster_records import Transition
from sailord.controller.lifetime_store import StoredLifetimes
from sailord.network.core.model import Measurement

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(records.Leader, records.NodeRecord, records.GenerationRecord, records.JobRecord),
        *(records.Durable, records.Order, records.Report, records.ReportReply, records.Abort),
        *(
            records.Output,
            records.KnownGeneration,
            records.KeptSteps,
            link_records.LinkOrder,
            link_records.ListenOrder,
        ),
        *(link_records.Listening, link_records.LinkTimes, interface.Snapshot, interface.Changed),
        *(interface.Put, interface.Outcome, SavedState, WorkerStatus, Transition),
        *(StoredLifetimes, CapacityRecord, Manifest, Measurement),
    )
}
"""By name: what sailord, agents and workers keep, and what they tell each other."""


def example(kind: Any, name: str = "") -> Any:
    """Return a value of this type in which every field is set."""
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return example(inner[0], name)
    if origin is typing.Literal:
        return inner[-1]
    if origin is tuple:
        return tuple(example(each, name) for each in inner if each is not Ellipsis)
    if dataclasses.is_dataclass(kind):
        hints = hints_of(kind)
        return kind(**{f.name: example(hints[f.name], f.name) for f in dataclasses.fields(kind)})
    simple = {int: len(name), float: len(name) / 2, bool: True, str: name, bytes: name.encode()}
    return simple[kind]


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields."""
    return codec._type_hints(kind)
