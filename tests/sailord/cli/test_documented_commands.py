"""What documents tell people to type is what ``sailorctl`` takes: commands, arguments, options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from sailord.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(sailorctl\s[^`]+)`")
LINE = re.compile(r"^ *\$ (sailorctl (?:.*\\\n)*.+)$", re.MULTILINE)
END = re.compile(r"\s[|>#]\s|&&|;|\.\.\.")
"""What is not part of the command any more."""


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a document, each in one line."""
    for found in (*SPAN.findall(FENCED.sub("", text)), *LINE.findall(text)):
        yield " ".join(END.split(re.sub(r"\\\n *>?", " ", found))[0].split())


def why_refused(command: str) -> str:
    """Return why the arguments are wrong; empty: they are right, or only some options are given."""
    context = click.Context(main, info_name="sailorctl")
    current: click.Command = main
    _, *words = shlex.split(command)
    try:
        while isinstance(current, click.Group) and words and words[0][0].islower():
            _, found, words = current.resolve_command(context, words)
            assert found is not None
            current, context = found, click.Context(found, context)
        if words and not isinstance(current, click.Group):
            current.make_context(current.name, [*words])
    except click.MissingParameter as error:
        is_begun = words[0][0] != "-" and isinstance(error.param, click.Argument)
        return str(error) if is_begun else ""
    except (click.BadParameter, click.BadOptionUsage, click.exceptions.Exit):
        return ""  # A name of what a person puts there, as USD; an option's name alone; --help.
    except click.UsageError as error:
        return str(error)
    return ""


def test_documents_name_commands_that_exist_with_arguments_that_they_take() -> None:
    wrong = {}
    for document in DOCUMENTS:
        for command in commands(document.read_text(encoding="utf-8")):
            if why := why_refused(command):
                wrong[f"{document.name}: {command}"] = why
    assert wrong == {}


def test_a_wrong_command_is_noticed() -> None:
    text = "See `sailorctl\nreplan JOB`.\n\n```console\n$ sailorctl nodes --fast | head\n```\n"
    assert list(commands(text)) == ["sailorctl replan JOB", "sailorctl nodes --fast"]
    assert "Missing" in why_refused("sailorctl replan JOB")
    assert "--fast" in why_refused("sailorctl nodes --fast")
    assert why_refused("sailorctl fly") != ""
    assert why_refused("sailorctl budget JOB USD") == why_refused("sailorctl drain") == ""
