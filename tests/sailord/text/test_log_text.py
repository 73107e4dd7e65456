"""Workers' logs for people: a step is a sentence, everything else stays as it is."""

from __future__ import annotations

import pytest

from sailord.text.log_text import log_text, whole_lines

STEP = (
    '{"job": "tale", "generation": 3, "loss": 2.998123456789, "seconds": 0.4312345678, '
    '"samples": 16, "step": 33, "at": 1795595087.78}\n'
)


def test_a_step_is_one_sentence_with_four_digits():
    text = log_text(STEP)
    assert text == "08:24:47  step 33 of tale: loss 2.998, 0.4312 s, samples 16\n"


@pytest.mark.usefixtures("in_berlin")
def test_a_step_has_the_same_clock_as_the_screen():
    assert log_text(STEP).startswith("09:24:47  step 33")


def test_an_evaluation_is_named_as_one():
    line = '{"job": "j", "step": 20, "evaluation": {"loss": 1.23456, "accuracy": null}}\n'
    assert log_text(line) == "evaluation after step 20 of j: loss 1.235, accuracy -\n"


def test_output_of_a_script_is_printed_unchanged():
    text = 'hello\n{"not": "ours"}\n{broken\n==> rank 0 <==\n{"step": "x"}'
    assert log_text(text) == text


def test_an_unfinished_line_is_printed_once_complete():
    assert whole_lines("a\nb") == ("a\n", "b")
    assert whole_lines("b") == ("", "b")


def test_speeds_are_shown_per_second():
    line = (
        '{"job": "j", "step": 20, "samples_per_s": 34.4, "tokens_per_s": 2201, "seconds": 0.465}\n'
    )
    assert log_text(line) == "step 20 of j: 34.4 samples/s, 2,201 tokens/s, 0.465 s\n"


def test_steps_that_a_script_prints_in_a_form_of_its_own_are_no_error():
    milliseconds = '{"step": 3, "at": 1795595087780, "loss": 2.5}\n'
    assert log_text(milliseconds) == "step 3: loss 2.5\n"
    assert log_text('{"step": 3, "at": NaN}\n') == "step 3: \n"
    for line in ('{"step": 3, "evaluation": 0.5}\n', '{"step": 3, "evaluation": null}\n'):
        assert log_text(line) == line
