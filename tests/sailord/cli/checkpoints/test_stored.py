"""Commands that read and write checkpoints in their storage."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sailord.cli.main import main


@pytest.mark.parametrize("name", ["../other", "a/b", "", "name of a job", "-x-"])
def test_an_import_under_a_name_that_no_job_can_have_is_refused_before_it_begins(tmp_path, name):
    """It takes hours, and could lie outside of the storage."""
    words = ["checkpoint", "import", str(tmp_path), "--job", "job.toml", f"--name={name}"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "is not the name of a job" in done.output) == (2, True)
