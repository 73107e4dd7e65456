"""Messages for Slack and PagerDuty: who gets what, and in which form."""

from __future__ import annotations

import json

import pytest

from sailord.notify.message_formats import FOR_PEOPLE, KINDS, body_of, wants

EVENT = {
    "id": "tale.held.1", "at": 1795594696.0, "kind": "job_held",
    "text": "3 attempts failed: <oom> & so",
    "job": "tale", "node": None, "generation": None, "step": None, "term": 3,
}  # fmt: skip


def told(form: str, **about: object) -> dict:
    return json.loads(body_of(form, "prod", "a-routing-key", json.dumps(EVENT | about).encode()))


def test_our_own_form_is_the_stored_message_byte_for_byte():
    assert body_of("sailor", "prod", "", b'{"kind": 1}') == b'{"kind": 1}'


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


@pytest.mark.parametrize("kind", ["generation_running", "job_finished"])
def test_a_job_that_trains_again_or_ends_resolves_its_incident(kind):
    found = told("pagerduty", kind=kind)
    assert found == {
        "routing_key": "a-routing-key",
        "event_action": "resolve",
        "dedup_key": "sailor/prod/tale/job_held",
    }


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
