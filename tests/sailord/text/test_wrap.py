"""Answers on a narrow terminal: lines break between words, under what they belong to."""

from __future__ import annotations

from sailord.text.wrap import wrapped


def test_lines_that_fit_are_unchanged():
    text = "job         tale: running\n\na  b"
    assert wrapped(text, 60) == text


def test_continuation_lines_stay_in_the_labels_column():
    assert wrapped(
        "throughput  1,966 tokens/s (predicted 1,063, computed without a profile)", 44
    ) == ("throughput  1,966 tokens/s (predicted 1,063,\n            computed without a profile)")


def test_sentences_break_between_words_and_are_indented():
    text = "this plan: " + "word " * 20
    lines = wrapped(text.rstrip(), 40).split("\n")
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith("  word") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == text.rstrip()


def test_words_longer_than_the_line_are_not_cut():
    uri = "file:///" + "x" * 80
    assert uri in wrapped(f"manifest {uri} is damaged", 40)
