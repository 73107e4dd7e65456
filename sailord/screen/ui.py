"""The keys of the screen: they change what is shown, or give an order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ScreenOrder = Literal["preempt", "drain", "kill", "next_job", "quit"]
VERBS: dict[str, ScreenOrder] = {"p": "preempt", "d": "drain", "k": "kill"}
PAGE = 10


@dataclass(frozen=True, slots=True)
class Ui:
    """How far events are scrolled back, and the order being typed."""

    can_kill: bool = False
    """Nodes are processes of this launcher."""
    back: int = 0
    """The number of newest events below the lower edge."""
    verb: ScreenOrder | None = None
    typed: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A complete order: what to do, and with which node."""

    kind: ScreenOrder
    node: str = ""


def after_key(ui: Ui, key: str, nodes: list[str], back_max: int) -> tuple[Ui, Asked | None]:
    """Return the screen's state after a key, and the order that it completed.

    The beginning of a node's name is enough. ``back_max``: where the first event is in sight.
    """
    if ui.verb is not None:
        return _press_in_prompt(ui, ui.verb, key, nodes)
    steps = {"up": 1, "down": -1, "pageup": PAGE, "pagedown": -PAGE}
    if key in steps:
        back = min(ui.back, back_max) + steps[key]
        return replace(ui, back=min(max(back, 0), back_max)), None
    if key == "end":
        return replace(ui, back=0), None
    if key in ("q", "interrupt"):
        return ui, Asked("quit")
    if key == "tab":
        return ui, Asked("next_job")
    verb = VERBS.get(key)
    if verb is None or (verb == "kill" and not ui.can_kill):
        return ui, None
    return replace(ui, verb=verb, typed=""), None


def _press_in_prompt(
    ui: Ui, verb: ScreenOrder, key: str, nodes: list[str]
) -> tuple[Ui, Asked | None]:
    found = matches(ui.typed, nodes)
    if key == "interrupt":
        return ui, Asked("quit")
    if key == "escape":
        return replace(ui, verb=None, typed=""), None
    if key == "enter":
        if len(found) != 1 or _is_another(ui.typed, found[0]):
            return ui, None
        return replace(ui, verb=None, typed=""), Asked(verb, found[0])
    if key == "tab" and len(found) == 1:
        return replace(ui, typed=found[0]), None
    if key == "backspace":
        return replace(ui, typed=ui.typed[:-1]), None
    return (replace(ui, typed=ui.typed + key) if len(key) == 1 else ui), None


def _is_another(typed: str, name: str) -> bool:
    """Return whether a name may be of another node than the typed one: a10 instead of a1."""
    return typed[-1:].isdigit() and name[len(typed) :][:1].isdigit()


def matches(typed: str, nodes: list[str]) -> list[str]:
    """Return the node with this name, or else those whose names begin with it."""
    if typed in nodes:
        return [typed]
    return sorted(name for name in nodes if name.startswith(typed))
