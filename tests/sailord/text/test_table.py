"""Tables are aligned for any content and any output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sailord.text.table import is_utf8, table


def test_text_is_left_aligned_and_numbers_right():
    text = table(
        ["zone", "GPUs", "$"], [["us-central1-a", "4", "1.50"], ["b", "128", "-"]], unicode=True
    )
    assert text.splitlines() == [
        "zone           GPUs     $",
        "─────────────  ────  ────",
        "us-central1-a     4  1.50",
        "b               128     -",
    ]


def test_without_unicode_all_is_ascii():
    text = table(["größe", "n"], [["ä→b", "1"]], unicode=False)
    assert text.splitlines() == ["gr??e  n", "-----  -", "??b    1"]


@pytest.mark.parametrize(
    "cells",
    [
        ["1", "-20"],
        ["33%", "7 %"],
        ["1,024", "9"],
        ["$1.20", "-$3"],
        ["9.5/14.6", "10/14"],
        ["1.2e-05", "3"],
        ["812.0 ms", "1.503 s"],
        ["", "3"],
    ],
)
def test_numbers_are_right_aligned(cells):
    lines = table(["a long header", "b"], [[cell, "x"] for cell in cells], unicode=True).split("\n")
    ends = {line.rindex("x") for line in lines[2:]}
    assert ends == {len("a long header  ")}
    assert all(
        line[: len("a long header")].endswith(cell)
        for line, cell in zip(lines[2:], cells, strict=True)
    )


@pytest.mark.parametrize("cell", ["0-12", "0-3, 5", "4 x A100-40", "3.11.2", "us-1"])
def test_text_that_resembles_a_number_is_left_aligned(cell):
    lines = table(["a long header"], [[cell], ["12"]], unicode=True).splitlines()
    assert lines[2:] == [cell, "12"]


def test_a_name_can_neither_break_a_line_nor_steer_the_terminal():
    lines = table(["name"], [["a\nb\x1b[31m\u202ec"]], unicode=True).splitlines()
    assert lines[2:] == ["a?b?[31m?c"]


def test_wide_letters_and_accents_line_up():
    lines = table(["名前", "x"], [["e\u0301", "y"]], unicode=True).splitlines()
    assert lines == ["名前  x", "────  ─", "e\u0301     y"]


def test_a_table_without_rows_is_its_header():
    assert table(["a", "b"], [], unicode=True) == "a  b\n─  ─"


def test_no_line_ends_in_spaces():
    text = table(["a", "long header"], [["x", ""]], unicode=True)
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("encoding", "speaks"),
    [("utf-8", True), ("UTF8", True), ("latin-1", False), ("ascii", False), (None, False)],
)
def test_utf8_encodings_are_recognised(encoding, speaks):
    assert is_utf8(encoding) is speaks


@pytest.mark.parametrize(("encoding", "rule"), [("utf-8", "─"), ("latin-1", "-")])
def test_table_rule_follows_the_encoding_of_standard_output(encoding, rule):
    code = "from sailord.text.table import table; print(table(['a'], [['b']]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.decode(encoding).splitlines() == ["a", rule, "b"]
