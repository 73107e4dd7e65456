"""The stories say what the controller does; rewrite them with SAILOR_RETELL=1, and read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stories.telling import told

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story_matches_the_controllers_replies(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if os.environ.get("SAILOR_RETELL"):
        path.write_text(told(text), encoding="utf-8")
        return
    assert told(text) == text


def test_stories_are_found() -> None:
    assert STORIES
