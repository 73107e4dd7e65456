"""The safe point is that of the job that is shown."""

from __future__ import annotations

from typing import Any

from agents.daemon.clock import Clock
from agents.protocol.records import Order
from sailord.controller.cluster_state import ClusterState
from sailord.controller.loop import Controller
from sailord.core.model.commands import WriteGeneration
from sailord.core.model.events import GenerationWritten, OrderGiven
from tests.sailord.core.sharing_states import OTHER, act, both_train, of_kind
from tests.sailord.core.states import JOB, NOW


def test_safe_point_is_of_the_second_job_once_the_first_has_ended():
    parts, commands = act(both_train(), OrderGiven(NOW + 2, Order("o", "cancel", JOB)))
    closed = [each.record for each in of_kind(WriteGeneration, commands)][-1]
    parts, _ = act(parts, GenerationWritten(NOW + 3, closed))
    assert parts.first.active is None
    none: Any = None
    controller = Controller(Clock(), ClusterState(parts), none, none, none, none)
    assert controller.safe_point() == controller.safe_point(OTHER)
    assert controller.safe_point() is not None
