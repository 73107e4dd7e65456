"""Each deliberate mutation still stands where it would be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutations import MUTATIONS, ROOT, Mutation, fails


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_matches_one_place(mutation: Mutation) -> None:
    text = Path(ROOT, mutation.path).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old


@pytest.mark.parametrize(("code", "is_failure"), [(0, False), (1, True), (2, True)])
def test_exit_code_says_whether_tests_fail(tmp_path: Path, code: int, is_failure: bool) -> None:
    assert fails(["-c", f"raise SystemExit({code})"], tmp_path) is is_failure


@pytest.mark.parametrize("code", [pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED])
def test_run_that_selects_no_test_is_an_error(tmp_path: Path, code: int) -> None:
    with pytest.raises(RuntimeError, match="no test was run"):
        fails(["-c", f"raise SystemExit({int(code)})"], tmp_path)
