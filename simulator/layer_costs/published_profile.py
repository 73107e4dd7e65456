"""Reads profiles in the published format of the SOSP'25 artefact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from simulator.documents.problems import InputError, Problem, Problems, malformed
from simulator.hardware.catalogue import Catalogue
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.models.layers import PRECISIONS, Precision


def profile_from_json(raw: Mapping[str, Any], *, place: str, catalogue: Catalogue) -> Profile:
    """Read a profile in the published format, reporting every mistake in it at once."""
    problems = Problems()
    reader = _PublishedReader(raw, place, problems, catalogue)
    try:
        profile = reader.profile()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(malformed(place, error, "profile")) from None
    problems.raise_if_any()
    assert profile is not None
    return profile


class _PublishedReader:
    """Reads one profile and collects its mistakes."""

    def __init__(
        self, raw: Mapping[str, Any], place: str, problems: Problems, catalogue: Catalogue
    ) -> None:
        self.raw, self.place, self.problems = raw, place, problems
        self.catalogue = catalogue
        self.merge_tail = False

    def profile(self) -> Profile | None:
        raw = self.raw
        for key in ("model", "config", "layers", "timing", "memory_per_layer"):
            if key not in raw:
                self.problems.add(
                    self.place, f'the key "{key}" is missing', "see docs/formats.md, profiles"
                )
        if self.problems.found:
            return None
        names = raw["layers"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.problems.add(f"{self.place}: layers", "must be a list of names")
            return None
        config = raw["config"]
        # Some profiles time the final norm separately; here it is part of the head.
        self.merge_tail = len(names) == int(config.get("transformer_layers", 0)) + 3
        sizes = self._sizes(len(names))
        timings = self._timings(len(names))
        if not timings and not self.problems.found:
            self.problems.add(f"{self.place}: timing", "has no measurement")
        if self.problems.found:
            return None
        return Profile(
            name=str(raw["model"]),
            sequence=int(config["seq_len"]),
            precision=self._precision(),
            layer_names=(*names[:-2], names[-1]) if self.merge_tail else tuple(names),
            timings=timings,
            sizes=sizes,
            optimizer_parameters={
                _degree(key): int(float(value))
                for key, value in raw.get("optimizer_profile_model_params", {}).items()
            },
            config=config,
        )

    def _precision(self) -> Precision:
        given = self.raw.get("precision", "fp32")
        for known in PRECISIONS:
            if given == known:
                return known
        self.problems.add(
            f"{self.place}: precision", f"is {given!r}", f"give one of {', '.join(PRECISIONS)}"
        )
        return "fp32"

    def _numbers(self, where: str, value: Any, count: int) -> list[float] | None:
        if not isinstance(value, list) or len(value) != count:
            self.problems.add(where, f"must be a list of {count} numbers, one per layer")
            return None
        for index, item in enumerate(value):
            is_number = isinstance(item, int | float) and not isinstance(item, bool)
            if not is_number or not 0 <= item < math.inf:
                what = f"must be a number that is zero or more, not {item!r}"
                self.problems.add(f"{where}[{index}]", what, "measure it again")
                return None
        return [float(item) for item in value]

    def _sizes(self, count: int) -> dict[int, LayerSizes]:
        sizes = {}
        for key, table in self._tables(self.raw["memory_per_layer"], "memory_per_layer"):
            where = f"{self.place}: memory_per_layer.{key}"
            rows = [
                self._numbers(f"{where}.{name}", table.get(name), count)
                for name in ("params_floats", "act_output_floats", "act_mem_floats")
            ]
            parameters, outputs, kept = rows
            if parameters is None or outputs is None or kept is None:
                continue
            if self.merge_tail:
                outputs = [*outputs[:-2], outputs[-1]]
            rows_of = (self._merge_norm(parameters), outputs, self._merge_norm(kept))
            sizes[_degree(key)] = LayerSizes(*(tuple(map(round, row)) for row in rows_of))
        return sizes

    def _merge_norm(self, row: list[float]) -> list[float]:
        """Return the row with a separate final norm added to the head."""
        return [*row[:-2], row[-2] + row[-1]] if self.merge_tail else row

    def _timings(self, count: int) -> dict[tuple[str, int, int], Timing]:
        timings = {}
        for kind, degree, batch, entry in self._entries():
            where = f"{self.place}: timing.{kind}.{degree}.{batch}"
            timing = self._timing(where, entry, count, f"{kind} {degree} {batch}")
            if timing is None:
                continue
            try:
                key = (self.catalogue.gpu_name(kind), _degree(degree), _degree(batch))
            except InputError as error:
                self.problems.take(error, place=f"{where}:")
                continue
            timings[key] = timing
        return timings

    def _entries(self) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
        """Yield GPU kind, TP, micro batch and entry of the runs that did not run out of memory."""
        for kind, by_degree in self._tables(self.raw["timing"], "timing"):
            for degree, by_batch in self._tables(by_degree, f"timing.{kind}"):
                for batch, entry in self._tables(by_batch, f"timing.{kind}.{degree}"):
                    if entry.get("fwd_s") is not None:
                        yield kind, degree, batch, entry

    def _tables(self, value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the tables inside a table, reporting values of any other type."""
        if not isinstance(value, Mapping):
            self.problems.add(f"{self.place}: {where}", "must be a table")
            return
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                yield key, inner
            else:
                self.problems.add(f"{self.place}: {where}.{key}", "must be a table")

    def _timing(self, where: str, entry: Mapping[str, Any], count: int, name: str) -> Timing | None:
        forward = self._numbers(f"{where}.fwd_s", entry["fwd_s"], count)
        backward = self._numbers(f"{where}.bwd_s", entry.get("bwd_s"), count)
        step = self._numbers(f"{where}.optimizer_step_s", [entry.get("optimizer_step_s")], 1)
        if forward is None or backward is None or step is None:
            return None
        if not all(seconds > 0 for seconds in forward):
            self.problems.add(f"{where}.fwd_s", "holds a zero", "measure it again")
            return None
        words = set(name.split())
        notes = tuple(f"{name}: {flag}" for flagged, flag in self._flags() if flagged <= words)
        # Published files have 0 where no optimizer step was timed.
        ahead, back = (np.array(self._merge_norm(row)) for row in (forward, backward))
        return Timing(ahead, back, step[0] or None, notes)

    def _flags(self) -> Iterator[tuple[set[str], str]]:
        """Yield the file's own flags: the words that a flagged entry's name contains, the flag."""
        for flag in self.raw.get("flags", []):
            where = str(flag.get("where", "")).replace(",", " ").replace("/", " ").split()
            degrees = [word for word in where if word.startswith("tp")]
            text = str(flag.get("flag", "doubtful")).replace("_", " ")
            for batch in (word for word in where if word.startswith("mbs")):
                yield {str(flag.get("gpu", "")), *degrees, batch}, text


def _degree(key: str) -> int:
    """Return the number in a key such as ``tp4`` or ``mbs8``."""
    digits = "".join(character for character in key if character.isdigit())
    if not digits or int(digits) == 0:
        raise InputError(
            Problem(key, "has no positive number", 'write a key such as "tp4" or "mbs8"')
        )
    return int(digits)
