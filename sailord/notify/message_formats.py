"""Bodies of outgoing messages: our own form, and those of Slack and PagerDuty."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

Format = Literal["sailor", "slack", "pagerduty"]
FORMATS: tuple[Format, ...] = get_args(Format)
KINDS = (
    *("generation_opened", "generation_running", "node_preempted", "checkpoint_committed"),
    *("job_held", "job_finished", "budget_at_risk", "deadline_at_risk"),
)
"""The kinds of events that are sent."""
FOR_PEOPLE = ("job_held", "job_finished", "budget_at_risk", "deadline_at_risk")
"""The kinds sent to Slack and PagerDuty unless ``events`` names others."""
SEVERITY = {"job_held": "critical", "budget_at_risk": "warning", "deadline_at_risk": "warning"}
MARKS = {
    **{"job_held": ":red_circle:", "budget_at_risk": ":warning:", "deadline_at_risk": ":warning:"},
    **{"done": ":white_check_mark:", "cancelled": ":black_square_for_stop:"},
    "failed": ":red_circle:",
}
"""Slack's mark of an event, by its kind, or by how a job has ended."""
RESOLVES = {
    "generation_running": ("job_held",),
    "job_finished": ("job_held", "budget_at_risk", "deadline_at_risk"),
}
"""The incidents at PagerDuty that an event of the same job closes."""
WORDS = {
    **{"job_held": "is held", "budget_at_risk": "budget at risk"},
    **{"deadline_at_risk": "deadline at risk", "node_preempted": "node draining"},
}
SUMMARY_MAX = 1024
"""PagerDuty refuses longer summaries."""


def wants(form: Format, events: tuple[str, ...], kind: str) -> bool:
    """Return whether a receiver gets an event; PagerDuty also gets what resolves an incident."""
    chosen = events or (KINDS if form == "sailor" else FOR_PEOPLE)
    closes = form == "pagerduty" and not set(RESOLVES.get(kind, ())).isdisjoint(chosen)
    return kind in chosen or closes


def bodies_of(form: Format, cluster: str, key: str, raw: bytes) -> tuple[bytes, ...]:
    """Return a stored message in the receiver's format, as one request each.

    ``key`` is PagerDuty's routing key.
    """
    if form == "sailor":
        return (raw,)
    event = json.loads(raw)
    told = (_slack(event, cluster),) if form == "slack" else _pagerduty(event, cluster, key)
    return tuple(json.dumps(each).encode() for each in told)


def sentence(event: Mapping[str, Any], cluster: str) -> str:
    """Return an event as a sentence that names its job and cluster."""
    about = event.get("job") or event.get("node") or "cluster"
    word = WORDS.get(str(event["kind"]))
    said = f"{word}: {event['text']}" if word else str(event["text"])
    return f"{about} ({cluster}) {said}"


def _slack(event: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    text = sentence(event, cluster)
    for letter, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(letter, escaped)
    kind = str(event["kind"])
    mark = MARKS.get(str(event["text"]).partition(":")[0] if kind == "job_finished" else kind)
    return {"text": f"{mark} {text}" if mark else text}


def _pagerduty(event: Mapping[str, Any], cluster: str, key: str) -> tuple[dict[str, Any], ...]:
    """Events of PagerDuty's Events API v2: what opens an incident, or closes those of its job."""
    kind = str(event["kind"])
    about = event.get("job") or event.get("node") or "cluster"

    def told(action: str, incident: str) -> dict[str, Any]:
        name = f"sailor/{cluster}/{about}/{incident}"
        return {"routing_key": key, "event_action": action, "dedup_key": name}

    if kind in RESOLVES:
        return tuple(told("resolve", incident) for incident in RESOLVES[kind])
    payload = {
        "summary": sentence(event, cluster)[:SUMMARY_MAX],
        "source": cluster,
        "severity": SEVERITY.get(kind, "info"),
        "timestamp": datetime.fromtimestamp(event["at"], UTC).isoformat(),
        "class": kind,
        "custom_details": {name: event[name] for name in ("job", "node", "generation", "step")},
    }
    return (told("trigger", kind) | {"payload": payload},)
