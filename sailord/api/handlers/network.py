"""Handlers of ``/v1/network``: measured links, and an order to measure them now."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from sailord.api.answers.responses import answer
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.orders import tell_given
from sailord.network.core.curve_fit import FitPoint, FittedCurve
from sailord.network.core.model import Failure
from sailord.network.network_document import network_document
from sailord.network.profiler import NetworkProfiler

FAILURES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class LinkView:
    """One measured curve."""

    from_zone: str
    from_gpu: str
    to_zone: str
    to_gpu: str
    flows: int
    both_ways: bool
    round_trip_s: float
    bytes_per_s: float
    """What large messages approach, all flows together."""
    points: tuple[FitPoint, ...]
    measurements: int
    node_pairs: int
    newest_at: float


@dataclass(frozen=True, slots=True)
class FlaggedView:
    """A measurement that is not used."""

    at: float
    sender: str
    receiver: str
    why: str


@dataclass(frozen=True, slots=True)
class NetworkView:
    """What is known of the network, as the leader measured it."""

    is_measuring: bool
    """An ordered round goes on."""
    unmeasured: int
    """Curves that the last ordered round left out."""
    open: int
    """Curves that the round has still to measure."""
    links: tuple[LinkView, ...]
    flagged: tuple[FlaggedView, ...]
    liars: tuple[str, ...]
    """Nodes whose reports are not used."""
    failures: tuple[Failure, ...]
    """The last ones."""


async def show_network(request: web.Request) -> web.Response:
    """Show measured links, flagged measurements and failures."""
    return answer(_view(request.app[CONTEXT].network))


async def measure_network(request: web.Request) -> web.Response:
    """Measure every link once now."""
    profiler = request.app[CONTEXT].network
    profiler.order_round()
    tell_given(request, "a measurement of all links was ordered")
    return answer(_view(profiler), status=202)


async def show_network_file(request: web.Request) -> web.Response:
    """Return the measured links as a network file."""
    return answer(network_document(request.app[CONTEXT].network.curves))


def _view(profiler: NetworkProfiler) -> NetworkView:
    return NetworkView(
        is_measuring=profiler.ordered_at is not None,
        unmeasured=profiler.unmeasured,
        open=len(profiler.open_questions),
        links=tuple(map(_link, profiler.curves)),
        flagged=tuple(
            FlaggedView(f.measurement.at, f.measurement.sender, f.measurement.receiver, f.why)
            for f in profiler.verdict.flagged
        ),
        liars=tuple(sorted(profiler.verdict.liars)),
        failures=tuple(profiler.failures)[-FAILURES_SHOWN:],
    )


def _link(curve: FittedCurve) -> LinkView:
    question = curve.question
    return LinkView(
        from_zone=question.sender.zone,
        from_gpu=question.sender.gpu,
        to_zone=question.receiver.zone,
        to_gpu=question.receiver.gpu,
        flows=question.flows,
        both_ways=question.both_ways,
        round_trip_s=curve.round_trip_s,
        bytes_per_s=curve.bytes_per_s,
        points=curve.points,
        measurements=curve.measurements,
        node_pairs=curve.node_pairs,
        newest_at=curve.newest_at,
    )
