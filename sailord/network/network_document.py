"""Writes fitted curves as ``network.json`` (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sailord.network.core.curve_fit import FittedCurve
from sailord.network.core.model import SIZES_BYTES, CurveToMeasure, Site


def network_document(curves: Sequence[FittedCurve]) -> dict[str, Any]:
    """Return the file's content; keys that the simulator does not read are for people."""
    whole = [curve for curve in curves if len(curve.points) == len(SIZES_BYTES)]
    return {
        "sizes_bytes": list(SIZES_BYTES),
        "curves": [_curve(number, curve) for number, curve in enumerate(whole)],
        "inter_node": [
            {**_ends(curve.question), "curve": number}
            for number, curve in enumerate(whole)
            if not curve.question.both_ways
        ],
        "both_ways": [
            {**_ends(curve.question), "curve": number}
            for number, curve in enumerate(whole)
            if curve.question.both_ways
        ],
        "all_reduce": [_all_reduce(curve) for curve in whole if curve.question.both_ways],
    }


def _curve(number: int, curve: FittedCurve) -> dict[str, Any]:
    def rates(seconds: Sequence[float]) -> list[float]:
        flows = curve.question.flows
        sized = zip(curve.points, seconds, strict=True)
        return [float(f"{flows * p.size_bytes / s / 1e9:.6g}") for p, s in sized]

    return {
        "id": number,
        "transport": "tcp",
        "bandwidth_GBps": rates([point.seconds for point in curve.points]),
        "low_GBps": rates([point.high_s for point in curve.points]),
        "high_GBps": rates([point.low_s for point in curve.points]),
        "round_trip_ms": round(curve.round_trip_s * 1e3, 4),
        "sizes_measured": sum(point.is_measured for point in curve.points),
        "measurements": curve.measurements,
        "node_pairs": curve.node_pairs,
        "measured_at": round(curve.newest_at, 1),
    }


def _ends(question: CurveToMeasure) -> dict[str, Any]:
    def end(site: Site) -> dict[str, Any]:
        return {"zone": site.zone, "gpu_type": site.gpu, "gpus": question.flows}

    return {"from": end(question.sender), "to": end(question.receiver)}


def _all_reduce(curve: FittedCurve) -> dict[str, Any]:
    """Return the times of an all-reduce of two nodes: two exchanges of half of its bytes."""
    return {
        **_ends(curve.question),
        "sizes_bytes": [2 * point.size_bytes for point in curve.points],
        "seconds": [float(f"{2 * point.seconds:.6g}") for point in curve.points],
    }
