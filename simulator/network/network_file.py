"""Reads ``network.json``: measured bandwidth curves, egress prices and machine sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from simulator.documents.fields import quote
from simulator.documents.problems import InputError, Problems, malformed
from simulator.hardware.catalogue import Catalogue
from simulator.network.curves import Curve, curve_from_bandwidths, make_consistent
from simulator.network.network import LinkEnd, MeasuredNetwork

TRANSPORTS = ("nccl", "tcp")
"""What carried the measured transfers."""
BAND = ("low_GBps", "high_GBps")
"""Keys of the range that held nine of ten transfers."""
PRICES = {
    "egress_usd_per_GB": "zone_to_zone",
    "gpu_price_usd_per_hour": "simulations_constants_GPU_PRICES",
}
"""Of the tables of prices that a file may have, the ones that are read."""


def network_from_json(
    raw: Mapping[str, Any], *, place: str, catalogue: Catalogue
) -> MeasuredNetwork:
    """Read a network file; raise ``InputError`` if it is malformed."""
    try:
        return _read_measured(raw, place, catalogue)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(malformed(place, error, "network")) from None


def _read_measured(raw: Mapping[str, Any], place: str, catalogue: Catalogue) -> MeasuredNetwork:
    problems = Problems()
    entries = _read_curves(raw, place, problems)
    sizes = raw.get("sizes_bytes")
    if not _is_growing(sizes):
        problems.add(f"{place}: sizes_bytes", "must be a growing list of positive numbers")
    problems.raise_if_any()
    assert isinstance(sizes, list)
    curves = _FileCurves(entries, tuple(float(size) for size in sizes), problems)
    raw_between, trusted = _read_between_machines(raw, curves, place, catalogue)
    within = _read_within_machines(raw, curves, place, catalogue)
    egress, prices = (_prices(raw, key, inner, place, problems) for key, inner in PRICES.items())
    for section, table in zip(PRICES, (egress, prices), strict=True):
        for row, columns in table.items():
            for column, usd in columns.items():
                if not 0 <= float(usd) < math.inf:
                    at = f"{place}: {section}, {row} and {column}"
                    problems.add(at, f"is {usd}", "give a price of at least 0")
    for gpu, count in raw.get("gpus_per_node", {}).items():
        _check_count(int(count), f"{place}: gpus_per_node.{gpu}", problems)
    problems.raise_if_any()
    return MeasuredNetwork(
        between={ends: make_consistent(table) for ends, table in trusted.items()},
        raw_between=raw_between,
        within=within,
        egress_usd_per_byte={
            (source, target): usd / 1e9
            for source, row in egress.items()
            for target, usd in row.items()
        },
        price_usd_per_gpu_hour={
            (catalogue.gpu_name(gpu), zone): float(usd)
            for gpu, row in prices.items()
            for zone, usd in row.items()
        },
        gpus_per_node={
            catalogue.gpu_name(gpu): int(count)
            for gpu, count in raw.get("gpus_per_node", {}).items()
        },
    )


@dataclass(frozen=True, slots=True)
class _FileCurves:
    """The curves of a file, and the sizes that all of them have."""

    entries: Mapping[int, Any]
    """By the identifier that links name."""
    sizes_bytes: tuple[float, ...]
    problems: Problems

    def find(self, identifier: int, flows: int, where: str) -> Curve | None:
        """Return a curve for this number of flows; ``None`` after a mistake, which is reported."""
        entry = self.entries.get(identifier)
        if entry is None or len(entry["bandwidth_GBps"]) != len(self.sizes_bytes):
            what = f"names curve {identifier!r}, which is missing or of a wrong length"
            self.problems.add(where, what)
            return None
        coefficients = entry.get("coeffs")
        return curve_from_bandwidths(
            flows,
            sizes_bytes=self.sizes_bytes,
            bytes_per_s=tuple(value * 1e9 for value in entry["bandwidth_GBps"]),
            polynomial=tuple(coefficients) if coefficients else None,
            is_tcp=entry.get("transport") == "tcp",
            relative_error=_band(entry),
        )


_RawLinks = dict[tuple[LinkEnd, LinkEnd], dict[tuple[int, int], Curve]]
"""Curves by both ends, and the numbers of GPUs there."""
_TrustedLinks = dict[tuple[LinkEnd, LinkEnd], dict[int, Curve]]
"""Curves by both ends, and the number of GPUs at each."""


def _read_between_machines(
    raw: Mapping[str, Any], curves: _FileCurves, place: str, catalogue: Catalogue
) -> tuple[_RawLinks, _TrustedLinks]:
    """Read the links between machines: as measured, and as the file trusts them."""
    raw_between: _RawLinks = {}
    trusted: _TrustedLinks = {}
    for index, entry in enumerate(raw.get("inter_node", [])):
        where = f"{place}: inter_node[{index}]"
        sides = [entry[side] for side in ("from", "to")]
        ends = [(side["zone"], catalogue.gpu_name(side["gpu_type"])) for side in sides]
        counts = (int(sides[0]["gpus"]), int(sides[1]["gpus"]))
        for side, count in zip(("from", "to"), counts, strict=True):
            _check_count(count, f"{where}.{side}.gpus", curves.problems)
        if min(counts) < 1:
            continue
        found = curves.find(entry["curve"], min(counts), where)
        if found is not None:
            raw_between.setdefault((ends[0], ends[1]), {})[counts] = found
        # A file may mark an entry as doubtful and suggest another curve.
        better = curves.find(entry.get("suggested_curve", entry["curve"]), min(counts), where)
        if better is not None and counts[0] == counts[1]:
            trusted.setdefault((ends[0], ends[1]), {})[counts[0]] = better
    return raw_between, trusted


def _read_within_machines(
    raw: Mapping[str, Any], curves: _FileCurves, place: str, catalogue: Catalogue
) -> dict[str, dict[int, Curve]]:
    """Read the links inside machines, by GPU kind and number of GPUs."""
    within: dict[str, dict[int, Curve]] = {}
    for index, entry in enumerate(raw.get("intra_node", [])):
        where, gpus = f"{place}: intra_node[{index}]", int(entry["gpus"])
        _check_count(gpus, f"{where}.gpus", curves.problems)
        found = curves.find(entry["curve"], max(gpus // 2, 1), where)
        if found is not None:
            within.setdefault(catalogue.gpu_name(entry["gpu_type"]), {})[gpus] = found
    return within


def _prices(
    raw: Mapping[str, Any], key: str, inner: str, place: str, problems: Problems
) -> Mapping[str, Any]:
    """Return a table of prices; report one that is not where it is read."""
    given = raw.get(key, {})
    if inner not in given and any(isinstance(entry, Mapping) for entry in given.values()):
        what = f"has no {quote(inner)}, where its prices are read"
        problems.add(f"{place}: {key}", what, f'write {{"{inner}": ...}} around them')
    found: Mapping[str, Any] = given.get(inner, {})
    return found


def _check_count(gpus: int, where: str, problems: Problems) -> None:
    if gpus < 1:
        problems.add(where, f"is {gpus}", "give a number of GPUs of at least 1")


def _read_curves(raw: Mapping[str, Any], place: str, problems: Problems) -> dict[int, Any]:
    curves: dict[int, Any] = {}
    entries = raw.get("curves")
    if not isinstance(entries, list):
        problems.add(f"{place}: curves", "must be a list", "see docs/formats.md, networks")
        return curves
    for index, entry in enumerate(entries):
        at = f"{place}: curves[{index}]"
        values = entry.get("bandwidth_GBps") if isinstance(entry, dict) else None
        if not _are_rates(values):
            problems.add(f"{at}.bandwidth_GBps", "must be a list of positive numbers")
            continue
        for key in BAND:
            rates = entry.get(key, values)
            if not _are_rates(rates) or len(rates) != len(values):
                cure = "give one for each of bandwidth_GBps, or leave it out"
                problems.add(f"{at}.{key}", "must be a list of positive numbers", cure)
        if entry.get("transport", "nccl") not in TRANSPORTS:
            problems.add(
                f"{at}.transport",
                f"is {quote(entry['transport'])}",
                f"give {' or '.join(map(quote, TRANSPORTS))}",
            )
        curves[entry.get("id", index)] = entry
    return curves


def _are_rates(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and math.isfinite(value) and value > 0 for value in values
    )


def _band(entry: Mapping[str, Any]) -> float | None:
    """Return how far nine of ten transfers were from the curve, as the median over its sizes.

    Estimates add up many messages, so the widest part of the range would overstate the error.
    """
    if not all(key in entry for key in BAND):
        return None
    sized = zip(entry["bandwidth_GBps"], *(entry[key] for key in BAND), strict=True)
    error: float = statistics.median(
        max(rate / slow, fast / rate) - 1 for rate, slow, fast in sized
    )
    return error


def _is_growing(sizes: object) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) > 1
        and all(isinstance(size, int | float) and size > 0 for size in sizes)
        and all(a < b for a, b in pairwise(sizes))
    )
