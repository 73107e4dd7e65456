"""Messages for Slack and PagerDuty: who gets what, and in which form."""

from __future__ import annotations

import json

import pytest

from sailord.notify.message_formats import FOR_PEOPLE, KINDS, bodies_of, wants

EVENT = {
    "id": "tale.held.1", "at": 1795594696.0, "kind": "job_held",
    "text": "3 attempts failed: <oom> & so",
    "job": "tale", "node": None, "generation": None, "step": None, "term": 3,
}  # fmt: skip


def all_told(form: str, **about: object) -> list[dict]:
    raw = json.dumps(EVENT | about).encode()
    return [json.loads(body) for body in bodies_of(form, "prod", "a-routing-key", raw)]


def told(form: str, **about: object) -> dict:
    (found,) = all_told(form, **about)
    return found


def test_our_own_form_is_the_stored_message_byte_for_byte():
    assert bodies_of("sailor", "prod", "", b'{"kind": 1}') == (b'{"kind": 1}',)


def test_slack_gets_a_sentence_with_its_letters_escaped():
    assert told("slack") == {
        "text": ":red_circle: tale (prod) is held: 3 attempts failed: &lt;oom&gt; &amp; so"
    }


def test_pagerduty_gets_an_incident_with_its_severity_and_key():
    found = told("pagerduty")
    assert found["routing_key"] == "a-routing-key"
    assert (found["event_action"], found["dedup_key"]) == ("trigger", "sailor/prod/tale/job_held")
    assert found["payload"]["severity"] == "critical"
    assert found["payload"]["source"] == "prod"
    assert found["payload"]["timestamp"] == "2026-11-25T08:18:16+00:00"
    assert found["payload"]["summary"].startswith("tale (prod) is held: 3 attempts failed")


def test_a_job_that_trains_again_resolves_the_incident_of_its_hold():
    assert all_told("pagerduty", kind="generation_running") == [
        {
            "routing_key": "a-routing-key",
            "event_action": "resolve",
            "dedup_key": "sailor/prod/tale/job_held",
        }
    ]


def test_a_job_that_has_ended_resolves_all_its_incidents():
    found = all_told("pagerduty", kind="job_finished", text="cancelled: cancel was ordered")
    assert {each["event_action"] for each in found} == {"resolve"}
    assert [each["dedup_key"] for each in found] == [
        f"sailor/prod/tale/{kind}" for kind in ("job_held", "budget_at_risk", "deadline_at_risk")
    ]
    opened = [told("pagerduty", kind=kind)["dedup_key"] for kind in FOR_PEOPLE if "risk" in kind]
    assert set(opened) < {each["dedup_key"] for each in found}


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("done: all 400 steps were done", ":white_check_mark:"),
        ("cancelled: cancel was ordered", ":black_square_for_stop:"),
        ("failed: no", ":red_circle:"),
    ],
)
def test_slack_marks_an_end_by_what_it_is(text, mark):
    assert told("slack", kind="job_finished", text=text)["text"] == f"{mark} tale (prod) {text}"


def test_summaries_for_pagerduty_are_cut_to_its_limit():
    assert len(told("pagerduty", text="x" * 5_000)["payload"]["summary"]) == 1024


def test_people_get_selected_events_and_programs_get_all():
    assert {kind for kind in KINDS if wants("slack", (), kind)} == set(FOR_PEOPLE)
    assert {kind for kind in KINDS if wants("pagerduty", (), kind)} == {
        *(*FOR_PEOPLE, "generation_running")
    }
    assert all(wants("sailor", (), kind) for kind in KINDS)


def test_chosen_events_replace_the_default_ones():
    assert [kind for kind in KINDS if wants("slack", ("node_preempted",), kind)] == [
        "node_preempted"
    ]
    assert not wants("pagerduty", ("budget_at_risk",), "generation_running")
    assert wants("pagerduty", ("budget_at_risk",), "job_finished"), "it closes the incident"
    assert not wants("pagerduty", ("node_preempted",), "job_finished")
