"""Commands that read and write checkpoints in their storage."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from tests.sailord.checkpoints.made import SPEC


@pytest.mark.parametrize("name", ["../other", "a/b", "", "name of a job", "-x-"])
def test_an_import_under_a_name_that_no_job_can_have_is_refused_before_it_begins(tmp_path, name):
    """It takes hours, and could lie outside of the storage."""
    words = ["checkpoint", "import", str(tmp_path), "--job", "job.toml", f"--name={name}"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "is not the name of a job" in done.output) == (2, True)


@pytest.mark.parametrize(("generation", "refused"), [(3, True), (0, False)])
def test_an_import_that_would_not_be_the_newest_checkpoint_is_refused_before_it_begins(
    tmp_path, monkeypatch, generation, refused
):
    """`submit --resume newest` would go on from what the job trained before."""
    job, folder = tmp_path / "job.toml", tmp_path / "kept" / "j" / f"{generation}-200"
    job.write_text(f'{SPEC}\n[checkpoint]\nuri = "file://{tmp_path}/kept"\n')
    folder.mkdir(parents=True)
    (folder / "manifest-1.json").touch()
    began = []
    monkeypatch.setattr("subprocess.run", lambda *words, **_: began.append(words) or sys.exit(7))
    words = ["checkpoint", "import", str(tmp_path), "--job", str(job), "--name=j"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, bool(began)) == ((2, False) if refused else (7, True)), done.output
    said = "has checkpoints of a job j that trained, the newest of step 200; give another --name"
    assert (said in done.output) == refused
