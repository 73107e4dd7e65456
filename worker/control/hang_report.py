"""Tells the agent, and through it sailord, for which ranks a rank waits unusually long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from worker.distributed.process_groups import print_blame
from worker.distributed.stalls import HangCause


def hang_reporter(
    status: dict[str, Any],
    nodes_of: Callable[[Iterable[int]], list[str]],
    report: Callable[[], None],
) -> Callable[[HangCause], None]:
    """Return what a transport calls once it knows whom to blame; the next step ends that."""

    def tell(blame: HangCause) -> None:
        print_blame(blame)
        status["hang"] = {"text": blame.text, "nodes": nodes_of(blame.ranks)}
        report()

    return tell
