"""The planners by name; each is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

from planner.compare.interface import Planner
from simulator.documents.problems import InputError, Problem, nearest

_CLASSES = {
    "aceso": "AcesoPlanner",
    "amp": "AmpPlanner",
    "atlas": "AtlasPlanner",
    "dtfm": "DtfmPlanner",
    "flashflex": "FlashFlexPlanner",
    "galvatron": "GalvatronPlanner",
    "megatron": "MegatronPlanner",
    "metis": "MetisPlanner",
    "oobleck": "OobleckPlanner",
    "piper": "PiperPlanner",
    "sailor-paper": "SailorPaperPlanner",
    "varuna": "VarunaPlanner",
    "whale": "WhalePlanner",
}

BASELINES = tuple(_CLASSES)
SAILOR = "sailor"


def baseline(name: str) -> Planner:
    """A planner of the literature by name."""
    if name not in _CLASSES:
        raise InputError(Problem("--planner", f'"{name}" is not known', nearest(name, names())))
    folder = "sailor_sosp25" if name == "sailor-paper" else name
    module = importlib.import_module(f"planner.baselines.{folder}.planner")
    return cast(Planner, getattr(module, _CLASSES[name])())


def names() -> Sequence[str]:
    """All planners: ours first, then those of the literature."""
    return (SAILOR, *BASELINES)
