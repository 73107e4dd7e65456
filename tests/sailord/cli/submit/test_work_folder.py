"""What of a script's folder travels, and what is refused at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sailord.cli.shared.described_job import DescribedText, JobFile
from sailord.cli.submit import scripts, work_folder
from sailord.cli.submit.scripts import ScriptOptions, _mounts, section, submitted_script
from sailord.cli.submit.work_folder import left_behind, pack_files, select
from sailord.client import Client
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.inputs.work_section import work_of

FILES = (
    *("train.py", "data.bin", "keep.bin", "notes/a.log", "notes/b.txt", "deep/x/y.tmp"),
    *("deep/z.tmp", "build/made.o", "src/build/own.c", "#odd", "a b.txt", "deep/x/kept.tmp"),
    *("é.txt", "sub/only"),
)  # fmt: skip
IGNORED = {
    ".gitignore": "*.bin\n!keep.bin\n/build/\n*.log\n# a comment\n\\#odd\n",
    "deep/.gitignore": "*.tmp\n!/x/kept.tmp\n",
    "sub/.gitignore": "*\n",
}


def fill(root: Path) -> Path:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name, text in IGNORED.items():
        (root / name).write_text(text)
    return root


def test_nested_ignore_files_apply(tmp_path):
    found = select(fill(tmp_path))
    kept = {"train.py", "keep.bin", "notes/b.txt", "src/build/own.c", "a b.txt", "é.txt"}
    assert set(found.names) == kept | {"deep/x/kept.tmp", ".gitignore", "deep/.gitignore"}


def test_an_ignore_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / ".gitignore"
    path.mkdir()
    with pytest.raises(InputError, match=r"\.gitignore: cannot be read: Is a directory"):
        select(tmp_path)
    path.rmdir()
    path.write_text("*.bin\n!\n")
    with pytest.raises(InputError, match=r"\.gitignore: Invalid git pattern: '!'; correct"):
        select(tmp_path)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the oracle")
def test_the_same_files_travel_as_git_would_add(tmp_path):
    fill(tmp_path)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q", tmp_path], check=True, env=environment)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=tmp_path, check=True, capture_output=True, text=True, env=environment,
    ).stdout  # fmt: skip
    assert sorted(select(tmp_path).names) == sorted(listed.rstrip("\0").split("\0"))
    # Ignore files above a folder within the repository hold, too.
    (tmp_path / "notes" / "data.bin").touch()
    assert select(tmp_path / "notes").names == ["b.txt"]
    assert select(tmp_path / "deep").names == [".gitignore", "x/kept.tmp"]
    assert select(tmp_path / "build").names == ["made.o"], "it was named, though it is ignored"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is asked")
def test_what_git_tracks_although_it_is_ignored_is_told(tmp_path, monkeypatch, capsys):
    """The script finds it here, and not on the nodes."""
    fill(tmp_path)
    for words in ("init -q", "add -f data.bin deep/z.tmp build/made.o notes/a.log train.py"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    (tmp_path / "notes/a.log").unlink()
    found = left_behind(tmp_path, select(tmp_path))
    assert found == ["build/made.o", "data.bin", "deep/z.tmp"]
    mounts = ["deep"]
    found = left_behind(tmp_path, select(tmp_path, mounts=mounts), mounts=mounts)
    assert found == ["build/made.o", "data.bin"]
    assert left_behind(tmp_path / "deep", select(tmp_path / "deep")) == ["z.tmp"]
    assert left_behind(tmp_path / "build", select(tmp_path / "build")) == []
    monkeypatch.setattr(JobFile, "described", lambda _: DescribedText(""))
    monkeypatch.setattr(scripts, "_upload", lambda *_: None)
    options = ScriptOptions(setup=(), secrets=(), mounts=(), checkpoint=None)
    submitted_script(Client("unix:///nowhere"), JobFile(tmp_path / "train.py"), options)
    assert "note: git tracks build/made.o and 2 more, and .gitignore" in capsys.readouterr().err


def test_a_folder_outside_of_git_causes_no_warning(tmp_path):
    fill(tmp_path)
    assert left_behind(tmp_path, select(tmp_path)) == []


def test_git_caches_and_virtual_environments_are_left_out(tmp_path):
    for name in (".git/x", "__pycache__/x.pyc", "a/__pycache__/x", "env/pyvenv.cfg", "env/lib/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "train.py").touch()
    assert select(tmp_path).names == ["train.py"]


def test_a_link_that_leads_outside_is_refused_with_its_name(tmp_path):
    (tmp_path / "data").symlink_to("/mnt/data")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "up").symlink_to("../../elsewhere")
    (tmp_path / "fine").symlink_to("inner")
    with pytest.raises(InputError) as refused:
        select(tmp_path)
    assert [problem.place for problem in refused.value.problems] == ["data", "inner/up"]
    assert "out of the folder, to /mnt/data" in str(refused.value.problems[0])


def test_data_that_nodes_have_elsewhere_does_not_travel(tmp_path):
    (tmp_path / "data").symlink_to("/mnt/data")
    for name in ("inner/corpus/x", "inner/corpus2", "train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = select(tmp_path, mounts={"data", "inner/corpus"})
    assert found.names == ["inner/corpus2", "train.py"]


def test_a_folder_of_10_gb_is_refused_unread_with_its_largest_entries(tmp_path):
    for name, size in {"runs/a.pt": 7e9, "runs/b.pt": 1e9, "data.bin": 2e9, "code.py": 10}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(int(size))
    with pytest.raises(InputError) as refused, (tmp_path / "out").open("wb") as out:
        pack_files(tmp_path, select(tmp_path), out)
    (problem,) = refused.value.problems
    assert "10.0 GB in 5 files, and 100.0 MB in 20,000 files may" in problem.what
    assert "the largest: runs 8.0 GB, data.bin 2.0 GB, code.py 10 bytes" in problem.what
    assert ".gitignore" in problem.cure
    assert (tmp_path / "out").stat().st_size == 0


def test_a_folder_with_very_many_files_is_not_looked_through_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "FILES_MAX", 5)
    monkeypatch.setattr(work_folder, "LOOKED_AT_MAX", 10)
    for number in range(50):
        (tmp_path / str(number)).touch()
    with pytest.raises(InputError, match="in 10 files"):
        select(tmp_path)


def test_mounts_are_checked_together_and_read_again_as_given():
    with pytest.raises(InputError) as refused:
        _mounts(["data", "../up=/mnt", "x=relative", "ok=/mnt"])
    said = [str(problem) for problem in refused.value.problems]
    assert [each.partition(";")[0] for each in said] == [
        '--mount: is "data"',
        '--mount: has the name "../up"',
        '--mount: has "x" at "relative"',
    ]
    given = _mounts(["a b=/mnt/ü=1", "in/ner/=gs://bucket/x"])
    rare = {"package": f"{'0' * 64}-1", "arguments": ["hi \U0001f642", "\x7f\x01"]}
    text = section("work", rare) + section("data.mounts", given)
    work = work_of(parse_document(text.encode(), name="job"))
    assert work is not None
    assert dict(work.mounts) == {"a b": "/mnt/ü=1", "in/ner": "gs://bucket/x"}
    assert work.arguments == ("hi \U0001f642", "\x7f\x01")


def test_a_link_through_another_is_refused_at_once_as_nodes_would(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "tool").symlink_to("current/tool")
    with pytest.raises(InputError, match="tool: is a link that leads through another, current"):
        select(tmp_path)


def test_options_allowed_for_a_scripts_plans_are_in_its_job(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    described = DescribedText('[model]\nscript = "train.py"\n')
    monkeypatch.setattr(JobFile, "described", lambda _: described)
    monkeypatch.setattr(scripts, "_upload", lambda *_: None)
    options = ScriptOptions(setup=(), secrets=(), mounts=(), checkpoint=None)

    def objective(given):
        job = JobFile(tmp_path / "train.py")
        text = submitted_script(Client("unix:///nowhere"), job, given)
        return parse_document(text.encode(), name="job").data.get("objective")

    assert objective(options) is None
    assert objective(replace(options, allow=("interleaved",))) == {"allow": ["interleaved"]}


def test_what_a_scripts_loggers_write_does_not_travel(tmp_path, monkeypatch, capsys):
    """A node would go on in a log of this machine, and each run would make another package."""
    for name in ("train.py", "logs/losses.jsonl", "logs/notes.txt", "runs/events"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    described = DescribedText("", outputs=("logs/losses.jsonl", "runs"))
    monkeypatch.setattr(JobFile, "described", lambda _: described)
    monkeypatch.setattr(scripts, "_upload", lambda *_: None)
    options = ScriptOptions(setup=(), secrets=(), mounts=(), checkpoint=None)
    submitted_script(Client("unix:///nowhere"), JobFile(tmp_path / "train.py"), options)
    assert f"packed {tmp_path}: 2 files" in capsys.readouterr().err


def test_a_script_that_its_folder_leaves_out_is_refused_with_the_cure(tmp_path):
    (tmp_path / ".gitignore").write_text("train_*.py\n")
    (tmp_path / "train_me.py").touch()
    (tmp_path / "other.py").touch()
    options = ScriptOptions(setup=(), secrets=(), mounts=(), checkpoint=None)
    with pytest.raises(InputError) as refused:
        submitted_script(Client("unix:///nowhere"), JobFile(tmp_path / "train_me.py"), options)
    (problem,) = refused.value.problems
    assert problem.what == "is left out of its folder by .gitignore"
    assert problem.cure == "add a line there: !train_me.py"
