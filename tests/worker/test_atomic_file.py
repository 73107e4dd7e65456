"""Atomic replacement of a file."""

from __future__ import annotations

import os

import pytest

from worker.atomic_file import OWNER_ONLY, replace_file, replacing


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path):
    path = tmp_path / "state.json"
    for content in ("first", b"second"):
        replace_file(path, content)
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_old_content(tmp_path):
    path = tmp_path / "state.json"
    replace_file(path, "old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_with_different_suffixes_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "object"
    with replacing(path, suffix="a") as one, replacing(path, suffix="b") as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one", "the last rename wins"


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    path, victim = tmp_path / "state.json", tmp_path / "victim"
    victim.write_text("held")
    (tmp_path / ".state.json.new").symlink_to(victim)
    replace_file(path, "new")
    assert victim.read_text() == "held"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_a_temporary_file_of_a_crash_is_replaced(tmp_path):
    path = tmp_path / "state.json"
    (tmp_path / ".state.json.new").write_text("a longer half of a state")
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [OWNER_ONLY, 0o640, 0o666])
def test_a_file_has_its_mode_before_its_name_and_never_a_wider_one(tmp_path, monkeypatch, mode):
    path, seen = tmp_path / "key.pem", list[int]()
    before, changed = os.umask(0o077), os.fchmod
    monkeypatch.setattr(
        os, "fchmod", lambda file, to: (seen.append(os.fstat(file).st_mode), changed(file, to))
    )
    try:
        with replacing(path, mode=mode) as file:
            seen.append(os.fstat(file.fileno()).st_mode)
            file.write(b"secret")
    finally:
        os.umask(before)
    assert [each & 0o777 for each in seen] == [0o600, mode]
    assert path.stat().st_mode & 0o777 == mode
