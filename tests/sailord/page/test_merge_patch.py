"""A patch turns the document that a watcher has into the present one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sailord.page.merge_patch import merge_patch

keys = st.sampled_from("abc")
leaves = st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2) | st.text("xy", max_size=2)
documents = st.recursive(
    st.dictionaries(keys, leaves, max_size=3),
    lambda inner: st.dictionaries(keys, leaves | inner, max_size=3),
)


def applied(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396, as a watcher does it."""
    found = dict(target)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            old = found.get(key)
            found[key] = applied(old if isinstance(old, dict) else {}, value)
        else:
            found[key] = value
    return found


@given(documents, documents)
def test_a_patch_turns_one_document_into_the_other(before: Any, after: Any) -> None:
    assert applied(before, merge_patch(before, after)) == after


@given(documents)
def test_nothing_changed_is_an_empty_patch(document: Any) -> None:
    assert merge_patch(document, dict(document)) == {}


def test_only_what_changed_is_sent() -> None:
    before = {"nodes": {"a": {"state": "ready", "step": 1}, "b": {"state": "ready"}}}
    after = {"nodes": {"a": {"state": "draining", "step": 1}, "b": {"state": "ready"}}}
    assert merge_patch(before, after) == {"nodes": {"a": {"state": "draining"}}}
