"""The predicted schedule of a plan, as the page draws it."""

from __future__ import annotations

from dataclasses import replace

from sailord.planning.messages import FoundPlan
from sailord.planning.plan_search import answer
from sailord.planning.timeline import timeline
from tests.sailord.planning.requests import NODES, QUESTION


def test_every_stage_has_its_passes_in_order_within_the_iteration() -> None:
    found = answer(QUESTION)
    assert isinstance(found, FoundPlan)
    drawn = timeline(replace(QUESTION, running=found.plan, ran_on=NODES))
    assert isinstance(drawn, dict)
    assert drawn["iteration_s"] == found.proposal.iteration_s
    for pipeline in drawn["pipelines"]:
        # Ranks go pipeline by pipeline, stage by stage.
        assert len({group["tp"] for group in pipeline["groups"]}) == 1
        first, tp = pipeline["numbers"][0] * len(pipeline["groups"]), pipeline["groups"][0]["tp"]
        ranks = [group["rank"] for group in pipeline["groups"]]
        assert ranks == [(first + s) * tp for s in range(len(ranks))]
        layers = [group["layers"] for group in pipeline["groups"]]
        assert [first for first, _ in layers[1:]] == [end for _, end in layers[:-1]]
        for group in pipeline["groups"]:
            times = [time for _, start, end, _ in group["passes"] for time in (start, end)]
            assert times == sorted(times), "passes of one device overlap"
            kinds = [kind for kind, *_ in group["passes"]]
            assert kinds.count("F") == kinds.count("B") > 0
            assert times[-1] <= group["update"][1] <= drawn["iteration_s"] * 1.000001


def test_a_plan_that_cannot_be_read_says_why() -> None:
    told = timeline(replace(QUESTION, running=b'{"pipelines": []}', ran_on=NODES))
    assert isinstance(told, str)
    assert told
