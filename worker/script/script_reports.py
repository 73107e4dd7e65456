"""Hands a script's figures to its loggers and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.documents.problems import InputError, Problem
from worker.models.user_module.parameter_uses import ParameterUses
from worker.reporting.loggers import Logger, close_all, log_to_all
from worker.script.model_watch import ModelWatch
from worker.script.outside_values import changed_variable, outside_values

Callback = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its figures; those of an evaluation have names that begin with eval/."""
_WEIGHTS = "`sailorctl checkpoint export` writes those of a checkpoint"


@dataclass(eq=False)
class ScriptReports:
    """Where the figures of one process go."""

    loggers: Sequence[Logger]
    callbacks: Sequence[Callback]
    watch: ModelWatch
    trained: Mapping[int, str]
    """The names of the script's trained parameters, by their ``id``."""
    used: Mapping[str, Any]
    """What ranks call of the script, by what a message calls it."""
    is_alone: bool
    _failed: dict[int, str] = field(default_factory=dict)
    """Why loggers are not used any more, by their places."""
    _told: set[str] = field(default_factory=set)

    def report(self, step: int, values: Mapping[str, float]) -> str:
        """Hand figures on; return why loggers are not used any more."""
        log_to_all(self.loggers, step, values, failed=self._failed)
        if self.callbacks:
            self._call_back(step, values)
        return "; ".join(self._failed.values())

    def end(self) -> None:
        """Close the loggers: no more figures come."""
        close_all(self.loggers, failed=self._failed)

    def _call_back(self, step: int, values: Mapping[str, float]) -> None:
        uses, before = ParameterUses(self.trained), outside_values(self.used)
        with uses, self.watch:
            for callback in self.callbacks:
                callback(step, values)
        self.watch.refuse_changes()
        if uses.layers_of:
            self._tell_once(f"see the model's initial weights; {_WEIGHTS}")
        number = self.watch.changed_number()
        if number is not None:
            what = f"change {number} of the script's model, which training does not follow"
            self._tell_once(f"{what}: let its forward pass compute it")
        changed = changed_variable(before, outside_values(self.used))
        if changed is not None:
            self._judge("change {}, which {} uses".format(*changed))

    def _judge(self, what: str) -> None:
        """Refuse a callback's change that other ranks would not see; with one process, note it."""
        if not self.is_alone:
            why = "on this rank alone"
            cure = "let nothing but the batch decide: a later phase is a job of its own"
            raise InputError(Problem("callbacks", f"{what}, {why}", cure))
        self._tell_once(f"{what}: on a cluster one rank alone would see it, which is refused")

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            print(f"note: callbacks {what}", flush=True)
