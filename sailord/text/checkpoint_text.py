"""Text of ``sailorctl checkpoint ls``: a job's checkpoints, and which of them are kept."""

from __future__ import annotations

from typing import Any

from sailord.text.table import table
from sailord.text.units import timestamp

ROLES = {
    "newest": "newest: the job resumes from it",
    "ordered": "the job resumes from it: a rollback was ordered",
    "older": "older, usable",
    "discarded": "discarded by a rollback",
}


def checkpoints_text(value: dict[str, Any]) -> str:
    """Return a job's checkpoints as a table, and how many are kept.

    Steps have no thousands separators: they are given to other commands as they stand.
    """
    if value["uri"] is None:
        return f"{value['job']} has no [checkpoint] uri"
    rows = []
    in_memory = value.get("step_in_memory")  # An older sailord does not say it.
    roles = ROLES if in_memory is None else ROLES | {"newest": "newest"}
    for each in value["checkpoints"]:
        state = roles[each["role"]] + (", pinned" if each["is_pinned"] else "")
        at = each["at"]
        when = "-" if at is None else timestamp(at)
        size, samples = f"{each['bytes']:,}", f"{each['samples']:,}"
        rows.append((str(each["step"]), str(each["generation"]), when, size, samples, state))
    for each in value["unreadable"]:
        why = f"unreadable: {each['why']}"
        rows.append((str(each["step"]), str(each["generation"]), "-", "-", "-", why))
    header = ("step", "generation", "when", "bytes", "samples", "state")
    lines = [table(header, rows) if rows else _none_found(value.get("durable_step"))]
    if value["unreadable"]:
        lines.append("unreadable checkpoints are skipped when the job is restored")
    if in_memory is not None:
        lines.append(f"nodes keep step {in_memory} in memory: the job resumes from it, and from "
                     "the newest checkpoint if these nodes are lost")  # fmt: skip
    lines.append(f"at {value['uri']}/{value['job']}")
    if keep := value["keep"]:
        lines.append(f"the last {keep} are kept ([checkpoint] keep), and pinned ones")
    if value["unfinished_bytes"]:
        lines.append(f"{value['unfinished_bytes']:,} bytes of unfinished uploads")
    lines += [value["trouble"]] if value["trouble"] else []
    if rows:
        job = value["job"]
        lines.append(f"go back to one: sailorctl checkpoint rollback {job} STEP; "
                     f"check its bytes: sailorctl checkpoint verify {job} STEP")  # fmt: skip
    return "\n".join(lines)


def _none_found(durable_step: int | None) -> str:
    """Return why there is no row; an older sailord does not say which step was durable."""
    if durable_step is None:
        return "no checkpoint yet"
    return (
        f"none is found there, though step {durable_step} was durable: "
        "was it deleted, or is its storage not mounted at this host?"
    )
