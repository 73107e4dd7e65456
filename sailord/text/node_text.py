"""Text of ``sailorctl nodes``: a table of all nodes, or the facts about one."""

from __future__ import annotations

from typing import Any

from sailord.text.causes import first_names
from sailord.text.table import table
from sailord.text.units import counted, duration, timestamp

DRAINED = "drained"
"""A draining node that no job needs any more: it may stop, and costs until it does."""
SAFE_TO_STOP = "drained: safe to stop, and paid for until then"


def nodes_text(nodes: list[dict[str, Any]]) -> str:
    """Return all nodes as a table, then which are unsound, slow or idle, and why.

    A row fits into 80 columns: the machine type is told with the other facts about one node.
    """
    header = ("node", "state", "zone", "gpus", "taking", "step", "if it died now")
    rows = []
    for n in nodes:
        gpus = f"{n['gpus']} x {n['gpu']}" + (" spot" if n["spot"] else "")
        state = DRAINED if n["safe_to_stop"] else n["state"]
        # A node that has no part of a generation reports step 0.
        step = "-" if n["step"] is None or n["taking"] == "idle" else str(n["step"])
        taking = n["taking"] or "-"
        rows.append((n["name"], state, n["zone"], gpus, taking, step, _loss_cell(n)))
    unsound = [f"{n['name']}: {n['unsound']}" for n in nodes if n["unsound"]]
    slow = [f"{n['name']} is slow: {n['slow']}" for n in nodes if n["slow"]]
    if not slow and any(n["taking"] == "running" for n in nodes):
        slow = ["no node that trains is slow"]
    idle = [f"{n['name']} is idle: {n['idle']}" for n in nodes if n["idle"]]
    out = [f"{n['name']} is {said}" for n in nodes if (said := _order(n))]
    return "\n".join([table(header, rows), *unsound, *slow, *idle, *out, *_versions(nodes)])


def _versions(nodes: list[dict[str, Any]]) -> list[str]:
    """Return which nodes have which version of Sailor, if they differ, as in an upgrade."""
    names: dict[str, list[str]] = {}
    for node in nodes:
        if node["state"] not in ("lost", "unreadable"):
            # An older sailord tells no versions, and an older agent has none.
            release = f"Sailor {told}" if (told := node.get("version")) else "an older Sailor"
            names.setdefault(release, []).append(node["name"])
    if len(names) < 2:
        return []
    return [
        f"{release} is on {counted(len(of), 'node')}: {first_names(of)}"
        for release, of in sorted(names.items())
    ]


def _order(node: dict[str, Any]) -> str:
    """Return since when a node is cordoned or drained, why, and the way back; empty if neither."""
    name = node["name"]
    if node["state"] == "cordoned" and not node["unsound"]:
        state, order, then = "cordoned", "cordoned", f"uncordon {name} lets plans use it again"
        if node["taking"] not in (None, "idle"):
            then = f"uncordon {name} lets it stay; until then the next better plan does without it"
    elif node["state"] == "draining" and node.get("drained_why"):
        state, order = DRAINED if node["safe_to_stop"] else "draining", "drained"
        then = f"withdraw {name} lets plans use it again" if node["leaves_at"] is None else ""
    else:
        return ""
    at, why = node.get(f"{order}_at"), node.get(f"{order}_why")  # An older sailord has neither.
    said = state
    if at is not None:
        said += f"{', ordered' if state == DRAINED else ' since'} {timestamp(at)}"
    if why:
        said += f": {why}"
    if node["leaves_at"] is not None:
        said += f"; it ends {timestamp(node['leaves_at'])}"
    return f"{said}; sailorctl {then}" if then else said


def _loss_cell(node: dict[str, Any]) -> str:
    """Return the steps that the job would lose."""
    loss = node["loss"]
    if loss is None:
        return "-"
    if loss["steps"] is None:
        return "not known yet"
    seconds = loss["seconds"]
    again = f", {duration(seconds)}" if seconds else ""
    then = ", then it waits" if loss["why_no_plan"] is not None else ""
    return f"{counted(loss['steps'], 'step')}{again} lost{then}"


def node_text(node: dict[str, Any]) -> str:
    """Return one node, a line for each fact, with what the job would lose with it."""
    spot = " spot" if node["spot"] else ""
    loss = node["loss"]
    idle = "nothing: no job has begun" if node["state"] != "lost" else ""
    taking = f"{node['taking']}, step {node['step']}" if node["taking"] else ""
    taking = "idle" if node["taking"] == "idle" else taking
    facts = {
        "node": node["name"],
        "state": SAFE_TO_STOP if node["safe_to_stop"] else node["state"],
        "ends": "" if node["leaves_at"] is None else timestamp(node["leaves_at"]),
        "machine": f"{node['machine']} in {node['zone']}, {node['gpus']} x {node['gpu']}{spot}",
        "address": node["address"],
        "version": node.get("version", ""),
        "taking": taking,
        "why lost": node["why_lost"],
        "failure": node["failure"],
        "unsound": node["unsound"],
        "out": _order(node),
        "slow": node["slow"],
        "idle": node["idle"],
        "trouble": node["trouble"],
        "if it died now": idle if loss is None else loss["text"],
    }
    return "\n".join(f"{name:15} {said}" for name, said in facts.items() if said)
