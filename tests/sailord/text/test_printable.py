"""What jobs print does not reach the terminal as orders."""

from __future__ import annotations

import pytest

from sailord.cli.shared.options import show
from sailord.text.printable import printable

CLIPBOARD = "\x1b]52;c;cm0gLXJmIC8=\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a{CLIPBOARD}b", "a?]52;c;cm0gLXJmIC8=?b"),
        ("1 %\r2 %\r\nend\tx\n", "1 %\n2 %\nend\tx\n"),
        ("caf\u00e9 \u2192 \u2500", "caf\u00e9 \u2192 \u2500"),
        ("in\u202everted", "in?verted"),
        ("caf\udce9.jpg", "caf?.jpg"),  # A file's name that is no UTF-8.
    ],
)
def test_control_characters_are_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_answers_for_a_person_have_no_escape_sequences(capsys) -> None:
    show({"reason": CLIPBOARD}, False, lambda value: f"held: {value['reason']}")
    assert capsys.readouterr().out == f"held: {printable(CLIPBOARD)}\n"
    show({"reason": CLIPBOARD}, True, str)
    assert "\\u001b]52" in capsys.readouterr().out
