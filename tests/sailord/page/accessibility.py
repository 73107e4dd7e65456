"""Checks a page in a browser against the rules of axe-core, wide and narrow, light and dark."""

from __future__ import annotations

import json
from importlib.resources import files

from tests.sailord.page.browser import Tab

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
FIND = (
    "axe.run({runOnly: " + json.dumps(RULES) + "}).then(r => [...r.violations.map(v => "
    "[v.id, v.nodes.map(n => n.html.slice(0, 120) + ' ' + n.failureSummary)]), "
    # A rule that ends with an error is not counted as broken.
    "...r.incomplete.filter(v => v.error).map(v => [v.id, String(v.error)])])"
)


async def check_rules(tab: Tab) -> None:
    """Fail if a rule is broken, or if the page is wider than the screen."""
    await tab.run(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8") + "; 1")
    for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
        await tab.screen(width, 900, dark=dark)
        found = await tab.run(FIND)
        assert found == [], (width, dark, found)
        page, screen = await tab.run("[document.documentElement.scrollWidth, innerWidth]")
        assert page <= screen, width
