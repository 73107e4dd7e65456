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
    **{"job_held": ":red_circle:", "job_finished": ":white_check_mark:"},
    **{"budget_at_risk": ":warning:", "deadline_at_risk": ":warning:"},
}
WORDS = {
    **{"job_held": "is held", "budget_at_risk": "budget at risk"},
    **{"deadline_at_risk": "deadline at risk", "node_preempted": "node leaves"},
}
SUMMARY_MAX = 1024
"""PagerDuty refuses longer summaries."""


def wants(form: Format, events: tuple[str, ...], kind: str) -> bool:
    """Return whether a receiver gets an event; PagerDuty also gets what resolves an incident."""
    chosen = events or (KINDS if form == "sailor" else FOR_PEOPLE)
    closes = form == "pagerduty" and "job_held" in chosen
    return kind in chosen or (closes and kind in ("generation_running", "job_finished"))


def body_of(form: Format, cluster: str, key: str, raw: bytes) -> bytes:
    """Return a stored message in the receiver's format; ``key`` is PagerDuty's routing key."""
    if form == "sailor":
        return raw
    event = json.loads(raw)
    told = _slack(event, cluster) if form == "slack" else _pagerduty(event, cluster, key)
    return json.dumps(told).encode()


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
    mark = MARKS.get(str(event["kind"]))
    return {"text": f"{mark} {text}" if mark else text}


def _pagerduty(event: Mapping[str, Any], cluster: str, key: str) -> dict[str, Any]:
    """An event of PagerDuty's Events API v2. A job that trains again or ends resolves the incident
    of its hold."""
    kind = str(event["kind"])
    about = event.get("job") or event.get("node") or "cluster"
    closes = kind in ("generation_running", "job_finished")
    incident = "job_held" if closes else kind
    told: dict[str, Any] = {
        "routing_key": key,
        "event_action": "resolve" if closes else "trigger",
        "dedup_key": f"sailor/{cluster}/{about}/{incident}",
    }
    if closes:
        return told
    payload = {
        "summary": sentence(event, cluster)[:SUMMARY_MAX],
        "source": cluster,
        "severity": SEVERITY.get(kind, "info"),
        "timestamp": datetime.fromtimestamp(event["at"], UTC).isoformat(),
        "class": kind,
        "custom_details": {name: event[name] for name in ("job", "node", "generation", "step")},
    }
    return told | {"payload": payload}
