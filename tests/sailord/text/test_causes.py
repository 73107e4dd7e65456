"""A reconfiguration's cause in a few words."""

from __future__ import annotations

from typing import get_args

import pytest

from sailord.text.causes import SHORT, NodeCause, node_cause, short_cause


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("a2 is lost: its lease expired; a3 is lost: the same", "a2, a3 lost"),
        (
            "c1 failed: rank 0: after 18 steps: ValueError: no (train.py:11 in check)",
            "c1 failed: rank 0: after 18 steps: ValueError: no (train.py:11 in check)",
        ),
        ("c1 failed", "c1 failed"),
        ("a4 could help", "a4 added"),
        ("a4 goes to another job; a5 goes to another job", "a4, a5 given to another job"),
        ("a4 could help; a1, a2 could help again", "a4 added; a1, a2 back"),
    ],
)
def test_cause_keeps_the_explanation_of_a_failure_alone(reason, short):
    assert short_cause(reason) == short


@pytest.mark.parametrize("cause", get_args(NodeCause))
def test_each_cause_of_a_node_has_a_short_form(cause: NodeCause) -> None:
    said = node_cause("a4", cause)
    assert short_cause(f"{said}; {node_cause('a5', cause)}") == f"a4, a5 {SHORT[cause]}"
