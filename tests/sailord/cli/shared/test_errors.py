"""Mistakes on the command line are answered with what may be meant."""

from __future__ import annotations

import io
import sys

import click
import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from sailord.cli.shared.errors import Group


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("stauts", "'status'"),
        ("checkpoint list", "'ls'"),
        ("checkpoint pni", "'pin'"),
        ("stop j", "'pause' or 'cancel'"),
        ("undrain a1", "'withdraw'"),
        ("orders", "'history' or 'events'"),
    ],
)
def test_unknown_command_is_answered_with_those_that_may_be_meant(typed, answer):
    done = CliRunner().invoke(main, typed.split())
    assert done.exit_code == 2
    assert f". Did you mean {answer}?\n" in done.stderr


def test_unknown_command_that_resembles_none_is_answered_without_a_guess():
    for word in ("xyzzy", "down"):  # There is ``cordon``, which is something else.
        done = CliRunner().invoke(main, [word])
        assert done.exit_code == 2
        assert "Did you mean" not in done.stderr
        assert f"No such command '{word}'" in done.stderr


def test_an_option_of_a_script_is_answered_with_where_it_belongs():
    done = CliRunner().invoke(main, ["submit", "train.py", "--lr", "1e-4"])
    assert done.exit_code == 2
    assert "No such option '--lr'. A script's own arguments follow --." in done.stderr
    done = CliRunner().invoke(main, ["status", "--lr"])
    assert "follow --" not in done.stderr


def test_letters_that_the_encoding_of_a_terminal_lacks_are_no_error(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    command = click.Command("say", callback=lambda: click.echo("\u00b15 % \u2192"))
    Group(commands={"say": command}).main(["say"], standalone_mode=False)
    assert raw.getvalue() == "\u00b15 % ?\n".encode("latin-1")
