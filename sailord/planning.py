"""The planner in processes of its own: it may think for seconds, and the loop never waits.

What a process has worked out for one job and one kind of cluster it keeps, so that the next
question is answered in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agents.protocol import NodeId, NodeRecord
from planner.answer import Question, read_ahead
from planner.lives import History
from planner.nodes import Node, cluster_with, is_placed, nodes_used
from planner.offer import offer_of
from planner.replan import Replanner
from planner.sailor import plan_job, tp_degrees
from planner.worth import judge_move
from sailord.model import Proposal
from simulator.cluster import Cluster, Pool
from simulator.cluster_file import load_cluster
from simulator.errors import InputError, Problem
from simulator.estimate import Estimate
from simulator.files import parse_document
from simulator.job import Job
from simulator.job_file import job_from_document
from simulator.plan import Plan
from simulator.plan_file import plan_from_document, plan_text
from simulator.request import load_measurements

PROCESSES = 2
"""One may still be at an old question."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question, as it travels to another process."""

    spec: str
    cluster_file: Path
    profiles: Path | None
    nodes: tuple[NodeRecord, ...]
    running: bytes | None
    """The plan that runs, or ran last."""
    ran_on: tuple[NodeRecord, ...]
    is_safe: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, ready to be stored."""

    proposal: Proposal
    plan: bytes
    about: dict[str, Any]
    """What the planner says of it: the figures to compare with what is measured, and why."""

    @property
    def about_bytes(self) -> bytes:
        return json.dumps(self.about, allow_nan=False).encode()


@dataclass(eq=False)
class PlanningService:
    """Asks the planner, within a time, and outlives its processes."""

    _pool: ProcessPoolExecutor | None = field(default=None)

    async def ask(self, request: Request, *, timeout_s: float) -> Found | str:
        """A plan, or why there is none."""
        loop = asyncio.get_running_loop()
        pool = self._pool = self._pool or _new_pool()
        try:
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(pool, answer, request)
        except TimeoutError:
            self._give_up(pool)
            return f"the planner found nothing within {timeout_s:g} s"
        except BrokenProcessPool:
            self._give_up(pool)
            return "a process of the planner died"

    def close(self) -> None:
        """End the planner's processes, whatever they are at."""
        if self._pool is not None:
            self._give_up(self._pool)

    def _give_up(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        # The pool has no public way to end a process that works.
        for process in list((pool._processes or {}).values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        PROCESSES, multiprocessing.get_context("spawn"), initializer=_begin_process
    )


def _begin_process() -> None:
    # Whoever stops sailord by hand stops the whole group; sailord itself ends its planners.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---- in the other process -----------------------------------------------------------------------


def read_job(spec: str) -> Job:
    """Read a job as it was submitted; it stands by itself and names no other file."""
    document = parse_document(spec.encode(), name="job", flaws_raise=False)
    model = document.data.get("model")
    named = [key for key in ("config", "file", "description", "factory") if key in (model or {})]
    if isinstance(model, dict) and named:
        what = f"names a file or code of the model with {named[0]}"
        raise InputError(Problem("job: [model]", what, "describe the model by a family"))
    return job_from_document(document)


def answer(request: Request) -> Found | str:
    """Answer one question."""
    try:
        job = read_job(request.spec)
        nodes = tuple(planner_node(record) for record in request.nodes)
        if request.is_safe:
            return _smallest(job, nodes, request)
        before = _running_plan(request)
        if before is None:
            return _from_nothing(job, nodes, request)
        return _from_running(job, nodes, before, request)
    except InputError as error:
        return "; ".join(map(str, error.problems))


def planner_node(record: NodeRecord) -> Node:
    """A node in the planner's words."""
    return Node(record.id, record.gpu, record.machine, record.zone, record.gpus, spot=record.spot)


def cluster_of(file: Path, nodes: Sequence[Node]) -> Cluster:
    """The cluster of the file, with a place for each node that it does not foresee."""
    cluster = load_cluster(file)
    known = {(pool.gpu, pool.machine, pool.zone, pool.spot) for pool in cluster.pools}
    prices = {(pool.gpu, pool.zone, pool.spot): pool for pool in cluster.pools}
    pools: list[Pool] = []
    for node in sorted(nodes):
        key = (node.gpu, node.machine, node.zone, node.spot)
        if key not in known:
            known.add(key)
            like = prices.get((node.gpu, node.zone, node.spot))
            pool = Pool(node.zone, node.gpu, node.machine, node.gpus, 0, spot=node.spot)
            if like is not None:
                price = like.price_usd_per_gpu_hour
                pool = replace(pool, price_usd_per_gpu_hour=price, price_source=like.price_source)
            pools.append(pool)
    return replace(cluster, pools=(*cluster.pools, *pools), quotas=())


@lru_cache(maxsize=4)
def _replanner(spec: str, file: Path, profiles: Path | None, kinds: tuple[Node, ...]) -> Replanner:
    cluster, job = cluster_of(file, kinds), read_job(spec)
    measurements = load_measurements(profiles, catalogue=cluster.catalogue)
    return Replanner(job, cluster, read_ahead(measurements, job, cluster.catalogue))


def _replanner_for(request: Request, nodes: Sequence[Node]) -> Replanner:
    """The same for all questions about the same kinds of machines."""
    kinds = {(n.gpu, n.machine, n.zone, n.spot): replace(n, id="") for n in sorted(nodes)}
    return _replanner(request.spec, request.cluster_file, request.profiles, tuple(kinds.values()))


def _running_plan(request: Request) -> Plan | None:
    if request.running is None:
        return None
    plan = plan_from_document(parse_document(request.running, name="the running plan"))
    return plan if is_placed(plan) else None


def _from_nothing(job: Job, nodes: Sequence[Node], request: Request) -> Found | str:
    replanner = _replanner_for(request, nodes)
    question = Question(job, cluster_with(replanner.cluster, nodes), replanner.measurements)
    found = plan_job(question)
    if found.plan is None:
        return "; ".join(map(str, found.problems)) or "no plan fits"
    assert found.estimate is not None
    placed = replanner.place(found.plan, nodes)
    assert placed is not None, "a plan for these nodes has room on them"
    return _found(job, placed, found.estimate, why=found.explain)


def _from_running(job: Job, nodes: Sequence[Node], before: Plan, request: Request) -> Found | str:
    ran_on = tuple(planner_node(record) for record in request.ran_on)
    if not nodes_used(before) <= {node.id for node in ran_on}:
        return _from_nothing(job, nodes, request)  # Nothing is known of the machines it ran on.
    replanner = _replanner_for(request, (*nodes, *ran_on))
    running = replanner.look_at(before)
    found = replanner.replan(running, nodes)
    if found.plan is None:
        return "; ".join(map(str, found.problems)) or "no plan fits"
    plan, estimate, _, move = found.found
    offer = offer_of(
        running,
        found,
        nodes,
        goal=job.objective.goal,
        age_s={node.id: math.inf for node in nodes},
    )
    verdict = judge_move(offer, History(), now_s=0.0)
    return _found(
        job,
        plan,
        estimate,
        why=(verdict.reason,),
        is_worth_it=verdict.moves,
        move_s=move.seconds,
        move=move.to_json(),
    )


def _smallest(job: Job, nodes: Sequence[Node], request: Request) -> Found | str:
    """Fewer nodes mean fewer that can fail: the first few of the largest that are enough."""
    order = sorted(nodes, key=lambda node: (node.spot, -node.gpus, node.id))
    count, found = 1, "no node is ready"
    result: Found | str = found
    while count <= len(order):
        result = _from_nothing(job, order[:count], request)
        if isinstance(result, Found):
            return result
        count = count + 1 if count == len(order) else min(2 * count, len(order))
    return result


def _found(
    job: Job,
    plan: Plan,
    estimate: Estimate,
    *,
    why: Sequence[str],
    is_worth_it: bool = True,
    move_s: float = 0.0,
    move: dict[str, Any] | None = None,
) -> Found:
    text = plan_text(plan).encode()
    sha = hashlib.sha256(text).hexdigest()
    members = tuple(sorted(NodeId(id_) for id_ in nodes_used(plan)))
    sentence = why[0] if why else "the best plan that was found"
    proposal = Proposal(sha, members, is_worth_it, sentence, estimate.iteration_s, move_s)
    about = {
        "estimate": estimate.to_json(),
        "tokens_per_iteration": estimate.samples_per_iteration * job.sequence,
        "why": list(why),
        "move": move,
    }
    return Found(proposal, text, about)


def job_shape(job: Job) -> tuple[int, int]:
    """Layers, and into how many atoms each is cut."""
    return len(job.model.layers), max(tp_degrees(job))
