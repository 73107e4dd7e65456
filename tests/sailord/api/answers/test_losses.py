"""What the loss of a node would cost, as a sentence and as people see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from agents.protocol.codec import plain
from agents.protocol.records import Durable, JobId, NodeId
from sailord.api.answers.losses import losses_view
from sailord.api.answers.render import nodes_view
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held
from sailord.core.model.state import Progress, State
from sailord.planning.precomputed import NextPlan, NoPlan
from sailord.text.node_text import node_text, nodes_text
from tests.sailord.core.queries.test_node_loss import RING, keeps, of_three_layers
from tests.sailord.core.states import JOB, NOW, A, B, C, D, durable, node, order

SOME = [NodeId(f"k{n}") for n in range(6)]
ALONE = keeps(A, (40, (0,))), keeps(B, (40, (1, 2)))
LATE = keeps(A, (39, (0,)), (40, (0,))), keeps(B, (39, (0, 1, 2)), (40, (1, 2)))
CROWD = RING[0], *(keeps(k, (40, (0,))) for k in SOME), *RING[1:]
EMPTY = keeps(A), *RING[1:], keeps(D, (40, (0, 2)))
NONE = keeps(A), keeps(B), keeps(C)
UNKNOWN = RING[0], RING[1], replace(node(C), report=None)


@pytest.mark.parametrize(
    ("nodes", "durables", "text"),
    [
        (RING, {}, "0 steps lost, state is kept on machine-b and machine-c"),
        (EMPTY, {}, "0 steps lost, state is kept on other nodes"),
        (CROWD, {}, "0 steps lost, state is kept on machine-b, machine-c, machine-k0, machine-k1 "
         "and 4 more"),
        (LATE, {}, "at most 1 step lost, state is kept on machine-b"),
        (ALONE, {JOB: durable(30)},
         "at most 10 steps lost: after the checkpoint of step 30, only it keeps its state"),
        (ALONE, {}, "at most 40 steps lost: only it keeps its state, and there is no checkpoint"),
        (NONE, {}, "at most 40 steps lost: no node keeps the job's state yet, and there is no "
         "checkpoint"),
        (NONE, {JOB: durable(30)},
         "at most 10 steps lost: the checkpoint of step 30 is newer than what nodes keep"),
        (UNKNOWN, {}, "not known yet: nodes have still to report what they keep"),
    ],
    ids=["ring", "keeps none", "many keepers", "late", "durable", "start", "kept nowhere",
         "only durable", "unknown"],
)  # fmt: skip
def test_the_sentence_names_steps_and_keepers(
    nodes: tuple[Node, ...], durables: Mapping[JobId, Durable], text: str
) -> None:
    known = replace(of_three_layers(*nodes), durables=durables)
    assert losses_view(known)[A].text == text


def test_the_list_has_the_steps_and_one_node_the_sentence() -> None:
    known = of_three_layers(*RING, keeps(D))
    views = nodes_view(known, losses=losses_view(known))
    shown = json.loads(json.dumps(plain(views)))["nodes"]
    *lines, slow, idle = nodes_text(shown).splitlines()[2:]
    assert [line[-12:] for line in lines] == ["0 steps lost"] * 4
    assert slow == "no node that trains is slow"
    assert idle.startswith("machine-d is idle: ")
    assert node_text(shown[0]).splitlines()[-1] == (
        "if it died now  0 steps lost, state is kept on machine-b and machine-c"
    )
    assert node_text(shown[3]).endswith("0 steps lost: the job does not train on it")


def running(known: State, *, step_s: float | None, predicted_s: float = 0.0) -> State:
    """The job at step 40, with the measured and the predicted seconds of a step."""
    active = known.active
    assert active is not None
    assert active.generation is not None
    generation = replace(active.generation, predicted_s=predicted_s)
    active = replace(active, progress=Progress(40, NOW, step_s), generation=generation)
    return replace(known, active=active)


def test_the_plan_that_would_follow_is_shown_if_it_was_computed() -> None:
    known = running(of_three_layers(*RING, keeps(D)), step_s=2.5, predicted_s=2.0)
    plans = {A: NextPlan(2, 5, 3.2), D: NextPlan(3, 6, 2.5)}
    views = losses_view(known, plans.get)
    assert (views[A].next_nodes, views[A].next_gpus, views[A].next_step_s) == (2, 5, 4.0)
    text = "and machine-c; then 2 nodes with 5 GPUs, about 4.0 s a step (now 2.5 s)"
    assert views[A].text.endswith(text)
    assert views[B].next_nodes is None
    assert "then" not in views[B].text
    assert views[D].next_nodes is None, "the job does not train on it"


def test_predicted_next_step_is_scaled_like_the_measured_present_one() -> None:
    """A step of 0.3 s was predicted as 0.9 s: beside it 1.2 s would look like a fourfold time."""
    plans = {A: NextPlan(2, 5, 1.2)}
    known = running(of_three_layers(*RING), step_s=0.3, predicted_s=0.9)
    assert losses_view(known, plans.get)[A].text.endswith("about 0.4 s a step (now 0.3 s)")
    for step_s, predicted_s in ((None, 0.9), (0.3, 0.0)):  # Nothing to scale by.
        known = running(of_three_layers(*RING), step_s=step_s, predicted_s=predicted_s)
        assert losses_view(known, plans.get)[A].text.endswith("5 GPUs, predicted 1.2 s a step")


def test_list_and_node_show_that_no_plan_would_follow() -> None:
    known = of_three_layers(*RING)
    views = losses_view(known, {A: NoPlan("cluster: too small; add one")}.get)
    assert views[A].why_no_plan == "cluster: too small; add one"
    assert views[A].next_nodes is None
    assert views[A].text.endswith(
        "; then the job waits, for the nodes left have no plan: cluster: too small; add one"
    )
    assert views[B].why_no_plan is None
    shown = json.loads(json.dumps(plain(nodes_view(known, losses=views))))["nodes"]
    first, second, *_ = nodes_text(shown).splitlines()[2:]
    assert first.rstrip().endswith("0 steps lost, then it waits")
    assert second.rstrip().endswith("0 steps lost")
    assert "no plan: cluster: too small" in node_text(shown[0])


def test_nodes_that_orders_keep_out_of_plans_are_named_with_the_cure() -> None:
    none = NoPlan("cluster: no node is up that may be used; wait for a node, or add one")
    cordoned, leaving = node(D, is_cordoned=True), node(NodeId("e"), draining_since=NOW)
    known = of_three_layers(*RING, cordoned, leaving)
    way_back = "; machine-d is cordoned: sailorctl uncordon machine-d lets plans use it"
    text = losses_view(known, {A: none}.get)[A].text
    assert text.endswith(none.why + way_back), "no order drains the other one"
    known = replace(known, marks={NodeId("e"): (order("drain", "e"),)})
    text = losses_view(known, {A: none}.get)[A].text
    also = "; machine-e was drained: sailorctl withdraw machine-e cancels that"
    assert text.endswith(none.why + way_back + also)
    gone = node(D, is_cordoned=True, absent_since=NOW - 1)
    assert losses_view(of_three_layers(*RING, gone), {A: none}.get)[A].text.endswith("or add one")


def test_next_plan_computed_before_a_node_became_usable_is_outdated() -> None:
    """Whether a plan would follow was computed when the generation began."""
    none = {A: NoPlan("cluster: too small; add one")}.get
    later, before = node(D, returned_at=NOW - 1), node(D)
    assert losses_view(of_three_layers(*RING, later), none)[A].why_no_plan is None
    assert losses_view(of_three_layers(*RING, before), none)[A].why_no_plan is not None


def test_seconds_of_a_loss_are_shown_beside_the_steps() -> None:
    known = running(of_three_layers(*ALONE), step_s=2.5)
    shown = json.loads(json.dumps(plain(nodes_view(known, losses=losses_view(known)))))["nodes"]
    assert "40 steps, 100.0 s lost" in nodes_text(shown)
    assert "at most 40 steps lost (100.0 s to train again): only it keeps" in node_text(shown[0])


def test_rows_of_nodes_fit_into_a_small_terminal() -> None:
    known = running(of_three_layers(*ALONE), step_s=2.5)
    shown = json.loads(json.dumps(plain(nodes_view(known, losses=losses_view(known)))))["nodes"]
    row = {"name": "a1", "zone": "us-central1-a", "machine": "a2-highgpu-8g", "safe_to_stop": True}
    assert max(map(len, nodes_text([each | row for each in shown]).splitlines())) <= 80
    assert nodes_text([each | row for each in shown]).splitlines()[2].split()[1] == "drained"
    assert "drained: safe to stop, and paid for until then" in node_text(shown[0] | row)


def test_a_held_job_has_no_next_plan_after_a_loss() -> None:
    known = running(of_three_layers(*RING), step_s=2.5)
    assert known.active is not None
    held = replace(known, active=replace(known.active, phase=Held("its budget is spent", NOW)))
    views = losses_view(held, {A: NoPlan("its budget is spent")}.get)
    assert views[A].text == losses_view(held)[A].text
    assert views[A].why_no_plan is None
