"""Handlers of ``/v1/jobs``: submit, list, show, order; and a job's plan, history and reasons."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from aiohttp import web

from agents.daemon.allowed_uris import CHECKPOINTS, MOUNTS, check_uri
from agents.protocol.names import JOB_ID
from agents.protocol.records import Bill, JobId, JobRecord
from agents.store.interface import StoreError
from sailord.api.access.callers import caller_of
from sailord.api.answers import render, types
from sailord.api.answers.queue_place import place_text, waits_for
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.bodies import check_id, read_object
from sailord.api.handlers.capacity import cooldowns_of, deadline_of, why_not_rented
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.orders import (
    handle_order,
    named,
    read_order,
    store_order,
    wait_until,
)
from sailord.api.handlers.packages import check_package, delete_unused, package_storage
from sailord.api.handlers.plans import read_plan
from sailord.capacity.core.planner_view import possible_supplies
from sailord.checkpoints.object_storage import StorageError
from sailord.checkpoints.resume import JobStart, job_start
from sailord.cluster_records import Transition
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import why_queue_stands
from sailord.planning.job_spec import job_shape, read_job, saving_of
from sailord.planning.job_warnings import size_warnings, warnings_of
from sailord.planning.messages import EndRequest
from sailord.text.units import YEAR_S, dollars, duration, timestamp
from simulator.documents.problems import InputError, Problem, nearest
from simulator.spec.job import Work
from worker.checkpoint.capacity_check import usual_room

PRIORITY_MAX = 1_000_000
WEIGHT_MIN = 0.001
END_S = 8.0
"""How long a submission waits to hear how soon, and for how much, a job could be done."""


async def list_jobs(request: web.Request) -> web.Response:
    """List all jobs."""
    api = request.app[CONTEXT]
    return answer(render.jobs_view(api.cluster.last_led, api.cluster.led_parts))


async def submit_job(request: web.Request) -> web.Response:
    """Submit a job to the queue."""
    api = request.app[CONTEXT]
    kinds = {"job": str, "id": str, "priority": int, "resume": str, "weight": float}
    body = await read_object(request, kinds, ("job",))
    job = await asyncio.to_thread(read_job, body["job"])
    id_ = JobId(body.get("id") or f"{job.name}-{uuid.uuid4().hex[:6]}")
    check_id(id_, "id")
    priority, weight = _priority_and_weight(body)
    if job.objective.deadline is not None and job.steps is None:
        what, cure = "needs the number of steps", "set training.steps, or leave the deadline out"
        raise InputError(Problem("objective.deadline", what, cure))
    checkpoints = api.cluster.checkpoints
    if job.work is not None:
        mounts = partial(_check_mounts, job.work, api.config.mounts)
        await checkpoints.threads.run(mounts)
    package = "" if job.work is None else job.work.package
    if package:
        api.use_package(package)
        await asyncio.to_thread(check_package, package_storage(api), package)
    layers, atoms = job_shape(job)
    now, saving = api.clock.now(), saving_of(job)

    def begin() -> JobStart:
        if saving.uri is not None:
            check_uri(saving.uri, checkpoints.allowed, CHECKPOINTS, "checkpoint: uri")
        return job_start(job, id_, saving.uri, body.get("resume"))

    beginning = await checkpoints.threads.run(begin)
    durable = beginning.durable
    bill = Bill(usd_max=job.objective.max_usd_total)
    caller = caller_of(request)
    by = "" if caller is None else f" by {caller.name}"
    reason = f"submitted{by}"
    deadline = job.objective.deadline
    record = JobRecord(
        id_,
        "queued",
        priority=priority,
        submitted_at=now,
        steps=job.steps,
        layers=layers,
        atoms=atoms,
        reason=reason,
        saving=saving,
        bill=bill,
        deadline=None if deadline is None else datetime.fromisoformat(deadline).timestamp(),
        begun=0 if durable is None else durable.point.step,
        generations_before=beginning.generations_before,
        weight=weight,
    )
    if not await api.gateway.submit(record, body["job"], durable):
        cure = "use another id"
        if durable is not None:
            # A job that has ended keeps its id, and its checkpoints are found by its id.
            export = f"`sailorctl checkpoint export {id_} --to DIR --form dcp`"
            cure += f"; {export} and `checkpoint import DIR --form dcp --name ID` copy its state"
        return refusal(409, Problem(f"job {id_}", "exists already", cure))
    api.cluster.read_store_soon()
    if api.cluster.state.term is not None:
        # The submitter's next request has to find the job.
        await wait_until(lambda: render.job_view(api.cluster.last_led, id_) is not None)
    if package:
        with contextlib.suppress(StorageError):  # The next submission tries again.
            await delete_unused(api, package_storage(api), package)
    led = api.cluster.last_led
    before = waits_for(led, id_)
    submitted = types.Submitted(
        **render.fields_of(record),
        warnings=(
            *warnings_of(job),
            *await asyncio.to_thread(size_warnings, job, _gpus_of(led), api.config.cluster_file),
            *await limit_warnings(api, record, body["job"]),
        ),
        snapshot_bytes=usual_room(job),
        waits_for=before,
        place=place_text(led, id_),
        blocked=why_queue_stands(led) if before else "",
    )
    return answer(submitted, status=201, headers={"Location": f"/v1/jobs/{id_}"})


def _priority_and_weight(body: Mapping[str, Any]) -> tuple[int, float]:
    """Return the priority and the weight that a submission gives its job."""
    weight = float(body.get("weight", 1.0))
    if not WEIGHT_MIN <= weight <= 1 / WEIGHT_MIN:
        cure = f"give a number from {WEIGHT_MIN:g} to {1 / WEIGHT_MIN:g}"
        raise InputError(Problem("weight", "out of range", cure))
    return _priority(body), weight


def _priority(body: Mapping[str, Any]) -> int:
    priority: int = body.get("priority", 0)
    if abs(priority) > PRIORITY_MAX:
        cure = f"give a number from -{PRIORITY_MAX:,} to {PRIORITY_MAX:,}"
        raise InputError(Problem("priority", "out of range", cure))
    return priority


def _gpus_of(state: State) -> Counter[str]:
    """The GPUs of all nodes that are not lost, counted by kind."""
    found = Counter[str]()
    for node in state.nodes.values():
        if not node.is_lost:
            found[node.record.gpu] += node.record.gpus
    return found


def _check_mounts(work: Work, allowed: Sequence[str]) -> None:
    for name, uri in work.mounts:
        if "://" in uri:
            check_uri(uri, allowed, MOUNTS, f"data.mounts: {name}")


async def limit_warnings(api: ApiContext, record: JobRecord, spec: str) -> tuple[str, ...]:
    """Why the job's deadline or total budget cannot be kept, as far as the planner knows."""
    has_budget = record.bill.usd_max is not None and record.steps is not None
    if record.deadline is None and not has_budget:
        return ()
    config, rented = api.config, api.capacity
    offered = () if rented is None else rented.provider.pools
    pools = possible_supplies(rented.state, offered) if rented is not None and offered else None
    asked = EndRequest(
        spec, config.cluster_file, config.profiles, config.measured_links, pools,
        config.capacity.usd_per_hour_max, begun=record.begun,
    )  # fmt: skip
    planner = api.cluster.planner
    told: tuple[str, ...] = ()
    if record.deadline is not None:
        shortest_s = await planner.ask_end("shortest_s", asked, timeout_s=END_S)
        told += deadline_warnings(record, shortest_s)
    if has_budget:
        told += budget_warnings(record, await planner.ask_end("least_usd", asked, timeout_s=END_S))
    return told


def budget_warnings(record: JobRecord, least_usd: float | str) -> tuple[str, ...]:
    """Return what is wrong with a total budget, given what the steps left cost at least."""
    budget = record.bill.usd_max
    assert budget is not None
    if isinstance(least_usd, str):
        what = "whether it pays for all steps left"
        return (f"max_usd_total: {what} is not known: {least_usd}",)
    if least_usd <= budget:
        return ()
    return (
        f"max_usd_total: ${budget:,.2f} do not pay for all steps left: by the cheapest plan they"
        f" cost ${least_usd:,.2f}; no plan keeps that, so the job will not start",
    )


def deadline_warnings(record: JobRecord, shortest_s: float | str) -> tuple[str, ...]:
    """Return what is wrong with a deadline, given what the steps left take at least."""
    assert record.deadline is not None
    told = []
    if isinstance(shortest_s, str):
        told.append(f"deadline: whether it can be met is not known: {shortest_s}")
    elif record.submitted_at + shortest_s > record.deadline:
        ends_at = record.submitted_at + shortest_s
        when = f"at {timestamp(ends_at)}, " if shortest_s < YEAR_S else ""
        told.append(
            f"deadline: it cannot be met: by the best plan all steps left are done"
            f" {when}{duration(ends_at - record.deadline)} later"
        )
    if record.saving.uri is None:
        told.append(
            "deadline: without a place for checkpoints ([checkpoint] uri) a loss of all copies"
            " in memory begins at step 0 again"
        )
    return tuple(told)


def job_of(request: web.Request) -> types.JobView:
    """The job in the path; answered with 404 if there is none."""
    id_, api = request.match_info["job"], request.app[CONTEXT]
    found = render.job_view(api.cluster.led_of(id_), JobId(id_)) if JOB_ID.match(id_) else None
    if found is None:
        known = (job.id for job in render.jobs_view(api.cluster.last_led).jobs)
        raise Refusal(404, Problem(id_[:64], "no such job", nearest(id_[:64], known)))
    return found


async def show_job(request: web.Request) -> web.Response:
    """Show one job."""
    return answer(job_of(request))


async def show_plan(request: web.Request) -> web.Response:
    """Show the plan of the job's last generation."""
    api, job = request.app[CONTEXT], job_of(request)
    if job.generation is None:
        cure = f"sailorctl why {job.id} says what the job waits for"
        raise Refusal(404, Problem(job.id, "has no plan yet", cure))
    sha = job.generation.plan
    plan, about = await read_plan(api, job.id, sha)
    return answer(types.PlanView(sha, plan, about))


async def show_history(request: web.Request) -> web.Response:
    """Show the job's transitions, each with its reason."""
    job = job_of(request)
    return answer(types.History(job.id, *await _read_history(request.app[CONTEXT], job.id)))


async def show_why(request: web.Request) -> web.Response:
    """Explain the job's state and plan."""
    api, job = request.app[CONTEXT], job_of(request)
    about: dict[str, Any] = {}
    history, unavailable_since = await _read_history(api, job.id)
    if job.generation is not None:
        with contextlib.suppress(StoreError):  # The answer then lacks the planner's reasons.
            _, about = await read_plan(api, job.id, job.generation.plan)
    why = render.why_view(api.cluster.led_of(job.id), job, about, history, unavailable_since)
    rented, active = api.capacity, api.cluster.state.active
    if rented is not None:
        is_active = active is not None and active.job == job.id
        why_none = why_not_rented(rented) if is_active else ""
        why = replace(
            why,
            deadline=deadline_of(rented.state, job.id),
            why_not_rented=why_none,
            cooldowns=cooldowns_of(rented.state) if is_active else (),
        )
    return answer(why)


async def order_job(request: web.Request) -> web.Response:
    """Cancel, pause, resume, replan or checkpoint a job."""
    return await handle_order(request, job_of(request).id)


async def set_budget(request: web.Request) -> web.Response:
    """Set the most that a job may cost in all, with what it has cost."""
    api, job = request.app[CONTEXT], job_of(request)
    kinds: dict[str, type] = {"id": str, "reason": str, "max_usd_total": float}
    body = await read_object(request, kinds, ("max_usd_total",))
    usd = float(body["max_usd_total"])
    if not 0 < usd < math.inf:
        raise InputError(Problem("max_usd_total", "is no amount", "give dollars above 0"))
    why = f" ({body['reason']})" if body.get("reason") else ""
    body["reason"] = f"at most {dollars(usd)} in all{why}"
    order = replace(read_order("budget", job.id, body), usd_max=usd)
    return await store_order(api, named(request, order))


async def set_priority(request: web.Request) -> web.Response:
    """Set a job's priority in the queue."""
    api, job = request.app[CONTEXT], job_of(request)
    kinds: dict[str, type] = {"id": str, "reason": str, "priority": int}
    body = await read_object(request, kinds, ("priority",))
    priority = _priority(body)
    why = f" ({body['reason']})" if body.get("reason") else ""
    body["reason"] = f"{priority}{why}"
    order = replace(read_order("priority", job.id, body), priority=priority)
    return await store_order(api, named(request, order))


async def _read_history(api: ApiContext, job: JobId) -> tuple[tuple[Transition, ...], float | None]:
    """A job's transitions; from the event feed while the store is unavailable, and since when."""
    try:
        return await api.gateway.read_history(job), None
    except StoreError:
        lines = api.cluster.history_of(job)
        return lines, api.cluster.store.unavailable_since or api.clock.now()
