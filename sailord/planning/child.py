"""Entry points of a planner process: start-up, and one function for each kind of request.

``pool`` sends these functions by reference. Each imports the planner when it first runs, so that
the controller itself never does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sailord.planning.messages import CapacityAnswer, CapacityRequest, FoundPlan, PlanRequest


def start(niceness: int) -> None:
    """Lower the priority, ignore Ctrl-C, and exit when sailord is gone."""
    os.nice(niceness)
    # Ctrl-C reaches the whole process group; sailord ends its planner processes itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent dies: a sailord killed by SIGKILL cannot end its planner processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def answer(request: PlanRequest) -> FoundPlan | str:
    """Find a plan."""
    from sailord.planning import plan_search  # noqa: PLC0415 - loads the planner

    return plan_search.answer(request)


def choose_capacity(request: CapacityRequest) -> CapacityAnswer:
    """Choose the machines to rent."""
    from sailord.planning import capacity_search  # noqa: PLC0415 - loads the planner

    return capacity_search.choose_capacity(request)


def start_precomputing(request: PlanRequest) -> None:
    """Start precomputing answers to the loss of nodes."""
    from sailord.planning import plan_search  # noqa: PLC0415 - loads the planner

    plan_search.start_precomputing(request)


def precompute_next() -> tuple[frozenset[str], frozenset[str], FoundPlan] | None:
    """Precompute the next answer."""
    from sailord.planning import plan_search  # noqa: PLC0415 - loads the planner

    return plan_search.precompute_next()


def build_tables(request: PlanRequest) -> None:
    """Build the tables for requests about the running plan."""
    from sailord.planning import plan_search  # noqa: PLC0415 - loads the planner

    plan_search.build_tables(request)
