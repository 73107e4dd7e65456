"""Text of the commands that ask a running cluster: status, jobs, events, moves, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from sailord.text.causes import short_cause
from sailord.text.cures import spend_more
from sailord.text.end_text import end_text
from sailord.text.event_lines import fold, line_text
from sailord.text.next_text import name_some, needed_text, next_texts
from sailord.text.node_text import DRAINED, SAFE_TO_STOP
from sailord.text.plan_text import plan_lines
from sailord.text.problem_text import problem_lines
from sailord.text.table import table
from sailord.text.units import clock, counted, dollars, duration, memory, timestamp

CAUSES_MAX = 5
REFUSED = {
    "token": "no valid token",
    "certificate": "no valid certificate",
    "signature": "a webhook or an agent without a valid signature or token",
    "user": "a user without rights",
    "crowd": "too many connections",
    "flood": "too many requests",
    "malformed": "not a valid request",
}
COLUMNS = 100
SMALL_USD = 0.005
OF_BUDGET = "its budget of "
"""In the reason of a hold: its budget was spent."""
FAR_OFF = 0.7
"""Told in words: a speed below this share of the prediction, or as far above it."""


def status_text(status: dict[str, Any], columns: int | None = None) -> str:
    """Return the cluster, its job, nodes, instances and plan, one line each.

    ``columns``: those of a small terminal, on which a problem is cut short.
    """
    store, leader = status["store"], status["leader"]
    led = f"leader {leader['host']} ({leader['address']})" if leader else "no leader"
    led += _when_elected(status)
    lines = [f"cluster     {status['cluster']}, {led}", *problem_lines(status, columns)]
    if not store["answers"]:
        away = duration(status["at"] - store["away_since"])
        lines.append(f"store       does not answer for {away}; the job trains, commits wait")
        lines += [f"            {store['trouble']}"] if store["trouble"] else []
    elif store["trouble"]:
        lines.append(f"store       rejects writes and blocks the controller: {store['trouble']}")
    unreadable = unreadable_lines(status)
    lines += [f"unreadable  {unreadable[0]}"] if unreadable else []
    lines += [f"            {each}" for each in unreadable[1:CAUSES_MAX]]
    if len(unreadable) > CAUSES_MAX:
        lines.append(f"            {len(unreadable) - CAUSES_MAX} more (sailorctl doctor)")
    if refused := refused_line(status):
        lines.append(f"refused     {refused}")
    # An older sailord says neither what all nodes cost, nor what was ordered about other jobs.
    job, all_usd, ordered = status["job"], status.get("usd_per_hour"), status.get("last_order")
    if job is not None:
        told = job | {"last_order": ordered or job["last_order"]}
        lines += _job_lines(told, status["at"], all_usd)
    else:
        lines.append("job         none")
        lines += [_told_line("order", ordered)] if ordered else []
        lines += [f"cost        {_all_nodes(all_usd)}"] if all_usd else []
    lines += beside_lines(status["running"], status["job"])
    if status["queued"]:
        lines.append(
            f"queue       {counted(status['queued'], 'job')}: {name_some(status['queue'])}"
        )
        lines += [f"            {status['blocked']}"] if status["blocked"] else []
    lines += _paused_lines(status["paused"])
    counts = ", ".join(f"{n} {state}" for state, n in _counts(status).items())
    unfit = len(status["unsound"])
    lines.append(
        f"nodes       {counts or 'none'}{f'; {unfit} of them cannot run the job' * bool(unfit)}"
    )
    if status["job"] is None or status["job"]["phase"]["name"] != "waiting":  # It says so.
        lines += [f"            {unsound}" for unsound in _unsound_lines(status["unsound"])]
    for node in status["leaving"]:
        at = node["leaves_at"]
        ends = "" if at is None else f", ends in {duration(at - status['at'])}"
        ends = ", its time is up" if at is not None and at <= status["at"] else ends
        state = SAFE_TO_STOP if node["safe_to_stop"] else "draining"
        if (left_at := node.get("left_at")) is not None:  # An older sailord does not say it.
            ends += f"; the job leaves it in {duration(max(left_at - status['at'], 0))}"
        stuck = f"; cannot drain: {node['stuck']}" if node["stuck"] else ""
        lines.append(f"            {node['name']} is {state}{ends}{stuck}")
    if status["capacity"] is not None:
        lines.append(f"instances   {glance_text(status['capacity'], status['at'])}")
        if status["capacity"]["deadline"]:
            lines.append(f"deadline    {status['capacity']['deadline']}")
    plan = status["job"]["plan"] if status["job"] else None
    return "\n".join([*lines, *(plan_lines(plan) if plan else [])])


def _counts(status: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of nodes by state, with drained ones apart from those that still drain."""
    counts, safe = dict(status["nodes"]), sum(n["safe_to_stop"] for n in status["leaving"])
    draining = counts.get("draining", 0)
    if drained := min(safe, draining):  # One whose agent has stopped counts as suspect.
        counts |= {"draining": draining - drained, DRAINED: drained}
    return {state: count for state, count in counts.items() if count > 0}


def _when_elected(status: Mapping[str, Any]) -> str:
    """Return when the leader was elected if the job began under another one."""
    leader, job = status["leader"], status["job"]
    since = None if leader is None else leader.get("since")
    begun_at = None if job is None else job.get("begun_at")
    if since is None or begun_at is None or since <= begun_at:
        return ""
    return f", elected {duration(status['at'] - since)} ago, while the job ran"


def _paused_lines(paused: Sequence[dict[str, Any]]) -> list[str]:
    """Return the jobs that wait for an operator."""
    lines = [
        f"{job['state']:11} {job['id']}{_at_step(job)}: {job['reason']}; {_cure_of_pause(job)}"
        for job in paused[:CAUSES_MAX]
    ]
    rest = len(paused) - CAUSES_MAX
    return [*lines, *([f"            {rest} more (sailorctl jobs)"] if rest > 0 else [])]


def _at_step(job: Mapping[str, Any]) -> str:
    """Return where a job goes on; an older sailord does not say it."""
    step, steps = job.get("step"), job.get("steps")
    of = "" if steps is None else f" of {steps:,}"
    return "" if step is None else f", step {step:,}{of}"


def _cure_of_pause(job: Mapping[str, Any]) -> str:
    return spend_more(job["id"]) if job["unpaid"] else f"sailorctl resume {job['id']} goes on"


def refused_line(status: dict[str, Any]) -> str:
    """Return how many requests were refused lately, and the last."""
    refusals = status["refusals"]
    if not refusals["last_hour"]:
        return ""
    cause = REFUSED.get(refusals["cause"], refusals["cause"])
    last = f"last {refusals['address'] or 'from an unknown address'} ({cause})"
    return f"{counted(refusals['last_hour'], 'request')} within the hour, {last}"


def unreadable_lines(status: dict[str, Any]) -> list[str]:
    """Return what sailord cannot read, and why."""
    return [f"{name}: {why}" for name, why in status["unreadable"].items()]


def _unsound_lines(nodes: Mapping[str, str]) -> list[str]:
    """Return which nodes cannot run the job, those with the same cause in one line."""
    by_cause: dict[str, list[str]] = {}
    for name, why in nodes.items():
        by_cause.setdefault(why, []).append(name)
    lines = [f"{name_some(names)}: {why}" for why, names in by_cause.items()]
    rest = len(lines) - CAUSES_MAX
    return [
        *lines[:CAUSES_MAX],
        *([f"{counted(rest, 'more cause')} (sailorctl nodes)"] * (rest > 0)),
    ]


def _job_lines(job: dict[str, Any], at: float, all_usd_per_hour: float | None = None) -> list[str]:
    phase, generation = job["phase"], job["generation"]
    since = "" if phase["since"] is None else f" for {duration(at - phase['since'])}"
    until = (
        "" if phase["deadline"] is None else f", times out in {duration(phase['deadline'] - at)}"
    )
    if phase.get("trains"):  # An older sailord does not say it.
        left = duration(max(phase["deadline"] - at, 0.0))
        until = f", it trains meanwhile; without an answer in {left} its plan stays for now"
    of = "" if job["steps"] is None else f" of {job['steps']}"
    lines = [f"job         {job['id']}: {phase['name']}{since}{until}"]
    if phase["reason"] and phase["name"] != "running":  # The last move tells that.
        lines.append(f"reason      {phase['reason']}")
        if ": setup `" in phase["reason"]:
            lines.append("            sailorctl logs NODE --setup shows what it printed")
    if phase["name"] == "held":
        lines.append(f"            {cure_of_hold(job['id'], job['spent'], phase['reason'])}")
    if generation is not None:
        members = name_some(job["members"])
        lines.append(f"generation  {generation['number']} ({generation['state']}) on {members}")
    for kind in ("move", "order"):
        if told := job[f"last_{kind}"]:
            lines.append(_told_line(kind, told, "ended " * (kind == "move")))
    measured, predicted = job["measured"], job["predicted"]
    before = job.get("earlier")  # An older sailord does not say it.
    loss = "" if measured["loss"] is None else f", loss {measured['loss']:.4g}"
    if loss and before and before["loss"] is not None:
        loss += f" ({before['loss']:.4g} {duration(at - before['at'])} ago)"
    lines.append(f"step        {job['step']}{of}{loss}, {duration(job['step_age_s'])} ago")
    lines += [f"end         {end}"] if (end := end_text(job, at)) else []
    was = f"; {duration(at - before['at'])} ago {number(before['per_s'])}" if before else ""
    lines.append(f"throughput  {_throughput(measured, predicted, job['unit'])}{was}")
    lines += [f"            {drift}" for drift in job["drift"]]
    lines.append(f"at risk     {at_risk_text(job)}; {durable_text(job)}")
    if names := job.get("needed"):  # An older sailord does not say it.
        lines.append(f"            {needed_text(names)}")
    if job["storage_trouble"]:
        lines.append(f"            {job['storage_trouble']}")
    lines += [f"            {trouble}" for trouble in job["troubles"]]
    coming = next_texts(job.get("next"), at, is_waiting=phase["name"] == "waiting")
    lines += [f"next        {'; '.join(coming)}"] if coming else []
    lines.append(f"cost        {_cost(job['spent'], all_usd_per_hour)}")
    return lines


def _told_line(kind: str, told: Mapping[str, Any], label: str = "") -> str:
    result = told.get("result")  # An older sailord does not say it.
    then = f"; {timestamp(told['result_at'])}: {result}" if result else ""
    return f"last {kind:6} {label}{timestamp(told['at'])}: {told['text']}{then}"


def cure_of_hold(job: str, spent: dict[str, Any] | None, reason: str) -> str:
    """Return what ends the hold of a job; one that has spent its budget cannot be resumed."""
    if spent and spent["unpaid"]:
        return spend_more(job, spent.get("usd_needed"))
    if spent and OF_BUDGET in reason:
        return f"its budget was raised since: sailorctl resume {job} goes on"
    return f"mend the cause, then sailorctl resume {job}; sailorctl cancel {job} ends it"


def _throughput(measured: dict[str, Any], predicted: dict[str, Any], unit: str) -> str:
    actual, expected = measured["tokens_per_s"], predicted["tokens_per_s"]
    text = f"{number(actual)} {unit}/s"
    if expected is not None:
        text += f" (predicted {number(expected)}"
        share = share_of_prediction(measured, predicted)
        text += ", computed without a profile" if share is None else f", {share:.0%} of it"
        text += f"){_far_off(share)}"
    stall_s = measured["stall_s"]
    return text + ("" if not stall_s else f"; a snapshot stalls training for {stall_s:.2g} s")


def _far_off(share: float | None) -> str:
    """Say in words that the measured speed is not what was predicted."""
    if share is None or FAR_OFF < share < 1 / FAR_OFF:
        return ""
    return f", much {'slower' if share < 1 else 'faster'} than predicted"


def share_of_prediction(measured: dict[str, Any], predicted: dict[str, Any]) -> float | None:
    """Return measured over predicted throughput, if the prediction rests on a measured profile.

    One computed from a GPU's data sheet is too rough, most of all for emulated GPUs.
    """
    actual, expected = measured["tokens_per_s"], predicted["tokens_per_s"]
    is_measured = predicted["source"] in (None, "measured", "interpolated")
    return actual / expected if is_measured and actual is not None and expected else None


def at_risk_text(job: dict[str, Any]) -> str:
    """Return how many steps are lost if one node is lost, and if all are."""
    all_lost = counted(job["steps_at_risk"], "step")
    if job["safe_step"] is None:
        return all_lost
    one_lost = counted(max(job["step"] - job["safe_step"], 0), "step")
    return f"{one_lost} if one node is lost now, {all_lost} if all are"


def durable_text(job: dict[str, Any]) -> str:
    """Return the durable step, or why there is none."""
    if job["durable_step"] is None:
        has_place = job["checkpoint_uri"] is not None
        return "no durable checkpoint yet" if has_place else "it names no place for checkpoints"
    age_s = job["durable_age_s"]
    ago = "" if age_s is None else f", written {duration(age_s)} ago"
    return f"durable up to step {job['durable_step']}{ago}"


def _cost(spent: dict[str, Any], all_usd_per_hour: float | None) -> str:
    rate = spent["usd_per_hour"]
    text = "no price known" if rate is None else f"${rate:,.2f}/h"
    text = f"this plan {text}" if rate else text
    text += f", {dollars(spent['usd'])} so far"
    if spent["usd_max"] is not None:
        text += f" of at most {dollars(spent['usd_max'])}"
    if spent["unpriced_s"]:
        text += f", without {duration(spent['unpriced_s'])} at unknown prices"
    is_more = all_usd_per_hour is not None and all_usd_per_hour - (rate or 0.0) >= SMALL_USD
    return f"{text}; {_all_nodes(all_usd_per_hour or 0.0)}" if is_more else text


def _all_nodes(usd_per_hour: float) -> str:
    """Return what is paid though a job's bill may not have it."""
    return f"all nodes ${usd_per_hour:,.2f}/h, used or not (sailorctl goodput)"


def glance_text(capacity: dict[str, Any], at: float) -> str:
    """Return rented instances in one line."""
    counts = [f"{capacity['up']} of {capacity['wanted']} wanted are up"]
    names = {"awaited": "starting", "asked": "requested"}
    counts += [f"{capacity[key]} {name}" for key, name in names.items() if capacity[key]]
    if capacity["resting"]:
        pools, until = counted(capacity["resting"], "pool"), capacity.get("rests_until")
        first = "the first " * (capacity["resting"] > 1)
        left = "" if until is None else f", {first}for {duration(until - at)} more"
        counts.append(f"{pools} in cooldown after a refusal{left}")
    if capacity["stop"]:
        counts.append("the budget is spent")
    return f"{', '.join(counts)}; ${capacity['usd_per_hour']:,.2f}/h"


def submitted_text(submitted: dict[str, Any]) -> str:
    """Return where a submitted job stands in the queue."""
    before, blocked = submitted["waits_for"], submitted["blocked"]
    # An older sailord says only which jobs are before it.
    behind = f"queued behind {name_some(before)}" if before else "queued"
    place = submitted.get("place") or behind
    size = memory(submitted["snapshot_bytes"])
    room = f"snapshots will take about {size} of memory, over all its nodes"
    return "\n".join([f"{submitted['id']} is {place}", room] + [blocked] * bool(blocked))


def beside_lines(running: Sequence[dict[str, Any]], job: dict[str, Any] | None) -> list[str]:
    """Return the jobs that share the cluster with the one that is shown above."""
    return [
        f"beside it   {each['id']}: {headline_of(each)} ({name_some(each['nodes'])})"
        for each in running
        if job is None or each["id"] != job["id"]
    ]


def headline_of(running: Mapping[str, Any]) -> str:
    """Return in a line how a job fares that shares the cluster."""
    of = "" if running["steps"] is None else f" of {running['steps']:,}"
    step_s = running["step_s"]
    each = "" if step_s is None else f", {step_s:.3g} s each"
    on = counted(len(running["nodes"]), "node")
    return f"{running['phase']}, step {running['step']:,}{of}{each}, {on}"


def jobs_text(jobs: list[dict[str, Any]]) -> str:
    """Return all jobs as a table; of the active one, its phase."""
    rows = []
    for j in jobs:
        step, ends_at = j.get("step"), j.get("ends_at")  # An older sailord does not say them.
        of = "" if j["steps"] is None else f"/{j['steps']}"
        reached = "-" if step is None else f"{step}{of}"
        end = "-" if ends_at is None else timestamp(ends_at)
        head = j["id"], j["phase"] or j["state"], reached, end, str(j["priority"])
        rows.append((*head, timestamp(j["submitted_at"]), j["reason"]))
    return table(("job", "state", "step", "end", "priority", "submitted", "reason"), rows)


def event_text(event: dict[str, Any]) -> str:
    """Return one event as a line."""
    about = f"{event['job']}: " if event.get("job") else ""
    return f"{timestamp(event['at'])}  {about}{event['text']}"


def moves_text(found: dict[str, Any]) -> str:
    """Return a job's reconfigurations: cause and cost of each, and the seconds of its phases."""
    lines = [line for move in found["moves"] for line in _move_lines(move)]
    return "\n".join([*(lines or ["no reconfiguration yet"]), *_from_memory_lines(found)])


def _move_lines(move: dict[str, Any]) -> list[str]:
    until = f"began {timestamp(move['at'])}, ended {clock(move['at'] + move['total_s'])}"
    begin = f"{until}  {move['kind']} → generation {move['generation']}"
    cost = [f"{move['total_s']:.2f} s in all"]
    if move["kind"] != "start":  # A start interrupts nothing.
        usd = move["usd"]
        lost = [f"{counted(move['steps_lost'], 'step')} lost"]
        lost += [] if usd is None else [dollars(usd)]
        downtime = f"downtime {move['downtime_s']:.2f} s (predicted {move['predicted_s']:.2f} s)"
        cost = [*lost, downtime, *cost]
    if move.get("is_planned") and move["kind"] != "start":
        cost.append("it trained until a step ended in quiesce")
    lines = [f"{begin}: {short_cause(move['reason'])}", f"  {', '.join(cost)}"]
    for name in ("phases", "predicted"):
        seconds = ", ".join(f"{each.replace('_', ' ')} {s:.2f}" for each, s in move[name])
        word = f"  {'took' if name == 'phases' else name:9} "
        lines += wrap(seconds, COLUMNS, initial_indent=word, subsequent_indent=" " * len(word))
    return lines


def why_text(why: dict[str, Any]) -> str:
    """Return why a job is in its state, why its generation began, and why it has this plan."""
    phase = why["phase"]["name"] if why["phase"] else why["state"]
    last = "the last change of plan: " * (phase == "running")
    lines = [f"{why['job']} is {phase}: {last}{(why['phase'] or why)['reason']}"]
    if place := why.get("place"):  # An older sailord says only for which jobs it waits.
        lines.append(place)
    elif why["waits_for"]:
        lines.append(f"waits for: {', '.join(why['waits_for'])}")
    if why["blocked"]:
        lines.append(why["blocked"])
    if phase == "held":
        lines.append(cure_of_hold(why["job"], why["spent"], (why["phase"] or why)["reason"]))
    # Before the next generation is open, and while there is none, all this is about the last one.
    which = "this" if phase in ("starting", "running", "planning", "stopping") else "last"
    if why["generation_reason"] and why["generation_reason"] != (why["phase"] or why)["reason"]:
        lines.append(f"{which} generation: {why['generation_reason']}")
    if why["deadline"]:
        lines.append(f"deadline: {why['deadline']}")
    if none := why.get("why_not_rented"):  # An older sailord does not say it.
        lines.append(f"no instance is wanted, since there is no plan: {none}")
    if why["iteration_s"] is not None:
        step = f"predicted to take {number(why['iteration_s'])} s a step"
        lines.append(f"{which} plan: {step}")
    # What was idle may be gone by now.
    lines += [
        f"{which} plan{', when it was made' * sentence.startswith('idle: ')}: {sentence}"
        for sentence in why["plan"]
    ]
    if why["said"] and phase in ("running", "planning"):
        lines.append(f"the planner's last answer: {why['said']}")
    coming = next_texts(why.get("next"), why.get("at"), is_waiting=phase == "waiting")
    lines += [f"next: {said}" for said in coming]
    lines += [f"next: {rest}" for rest in why.get("cooldowns", ())]
    lines += [f"idle: {idle}" for idle in why["idle"]]
    lines += [f"cannot drain: {stuck}" for stuck in why["stuck"]]
    lines += [f"steps: {drift}; sailorctl profile model measures it" for drift in why["drift"]]
    lines += ["before:", *(f"  {event_text(line)}" for line in why["last"])]
    return "\n".join([*lines, *_from_memory_lines(why)])


def history_text(history: dict[str, Any], *, is_whole: bool = False) -> str:
    """Return a job's transitions, each with its reason; a reconfiguration in one line."""
    found = history["history"]
    if is_whole:
        lines = [event_text(each) for each in found]
    else:
        kinds = ("transition", "reconfigured")
        marked = [each | {"kind": kinds[each["move"] is not None]} for each in found]
        lines = [line_text(line) for line in fold(marked)]
    return "\n".join([*lines, *_from_memory_lines(history)]) or "no transition yet"


def _from_memory_lines(value: dict[str, Any]) -> list[str]:
    """Return a warning that the answer came from sailord's memory, not from the store."""
    since = value["store_away_since"]
    if since is None:
        return []
    return [f"the store has not answered since {timestamp(since)}; shown from sailord's memory"]


def number(value: float | None) -> str:
    """Return a number with thousands, or four digits; unknown: a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
