"""What a rule answers: ``PASS``, ``WAIT`` or a ``Step``."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

from sailord.core.state import Command, State


class NoStep(Enum):
    """The answers of a rule that changes nothing."""

    PASS = "pass"
    WAIT = "wait"


PASS: Final = NoStep.PASS
"""Nothing for this rule to do: ask the next one."""
WAIT: Final = NoStep.WAIT
"""Nothing may happen before another event: ask no further rule."""


class Step(NamedTuple):
    """A new state and the commands that go with it; then the rules are asked from the first on."""

    state: State
    commands: tuple[Command, ...] = ()


RuleAnswer = Step | Literal[NoStep.PASS, NoStep.WAIT]
