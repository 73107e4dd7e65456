"""Archives of work folders: the same for the same content, and safe to unpack."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.work import archive
from agents.work.archive import ArchiveError, pack, unpack
from agents.work.package import package_of

NAMES = st.lists(
    st.text("abc.é ", min_size=1, max_size=5).filter(lambda name: name.strip(". ")),
    min_size=1, max_size=3,
).map("/".join)  # fmt: skip


def fill(root: Path, files: dict[str, bytes]) -> list[str]:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return list(files)


def packed(tmp_path: Path, root: Path, names: list[str], to: str = "packed") -> Path:
    with (tmp_path / to).open("wb") as out:
        pack(root, names, out)
    return tmp_path / to


@given(files=st.dictionaries(NAMES, st.binary(max_size=200), max_size=6))
def test_what_is_unpacked_is_what_was_packed(files, tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    names = {n for n in files if not any(o.startswith(f"{n}/") for o in files)}
    files = {name: files[name] for name in names}
    archived = packed(root, root / "a", fill(root / "a", files) if files else [])
    unpack(archived, root / "b")
    found = {p for p in (root / "b").rglob("*") if p.is_file()}
    assert {str(p.relative_to(root / "b")): p.read_bytes() for p in found} == files


def test_a_package_name_depends_on_its_content_alone(tmp_path):
    files = {"train.py": b"print()", "inner/data": b"x" * 100_000, "é": b""}
    one = packed(tmp_path, tmp_path / "one", fill(tmp_path / "one", files), "1")
    two = packed(tmp_path, tmp_path / "two", fill(tmp_path / "two", files)[::-1], "2")
    os.utime(tmp_path / "two" / "train.py", (1, 1))
    two = packed(tmp_path, tmp_path / "two", list(files)[::-1], "2")
    assert package_of(one) == package_of(two)
    (tmp_path / "two" / "train.py").chmod(0o755)
    changed = packed(tmp_path, tmp_path / "two", list(files), "3")
    assert package_of(one) != package_of(changed)
    unpack(changed, tmp_path / "out")
    assert os.access(tmp_path / "out" / "train.py", os.X_OK)


def test_a_link_within_the_folder_travels(tmp_path):
    names = fill(tmp_path / "a", {"inner/real": b"1"})
    (tmp_path / "a" / "link").symlink_to("inner/real")
    unpack(packed(tmp_path, tmp_path / "a", [*names, "link"]), tmp_path / "b")
    assert (tmp_path / "b" / "link").read_bytes() == b"1"


def member(name: str, kind: bytes = tarfile.REGTYPE, *, size: int = 0, link: str = ""):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info


def by_hand(path: Path, *members: tarfile.TarInfo) -> Path:
    with gzip.open(path, "wb") as out, tarfile.open(fileobj=out, mode="w") as made:
        for info in members:
            made.addfile(info, io.BytesIO(bytes(info.size)))
    return path


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ([member("../out")], "outside"),
        ([member("a/../../out")], "outside"),
        ([member("/tmp/out")], "outside"),
        ([member("link", tarfile.SYMTYPE, link="/etc")], "leads outside"),
        ([member("a/link", tarfile.SYMTYPE, link="../../x")], "leads outside"),
        ([member("hard", tarfile.LNKTYPE, link="other")], "neither file nor link"),
        ([member("pipe", tarfile.FIFOTYPE)], "neither file nor link"),
        ([member("device", tarfile.CHRTYPE)], "neither file nor link"),
        (
            [
                member("p/q/link", tarfile.SYMTYPE, link="../.."),
                member("esc", tarfile.SYMTYPE, link="p/q/link/../outside"),
                member("esc/evil", tarfile.SYMTYPE, link="x"),
            ],
            "through another: 'esc'",
        ),
        (
            [member("a", tarfile.SYMTYPE, link="b"), member("a/x", tarfile.SYMTYPE, link="y")],
            "through another: 'a/x'",
        ),
        ([member("a"), member("a", tarfile.SYMTYPE, link="b")], "twice"),
        ([member("a"), member("a")], "twice"),
        ([member("a"), member("a/b")], "twice"),
    ],
)
def test_an_archive_made_by_hand_cannot_leave_its_folder(members, what, tmp_path):
    with pytest.raises(ArchiveError, match=what):
        unpack(by_hand(tmp_path / "bad", *members), tmp_path / "in" / "work")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "in"]
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["work"]


def test_no_file_is_written_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    made = by_hand(tmp_path / "bad", member("a", tarfile.SYMTYPE, link="b"), member("a/x", size=1))
    with pytest.raises(ArchiveError, match="twice"):
        unpack(made, tmp_path / "work")


@pytest.mark.parametrize("limit", ["BYTES_MAX", "FILES_MAX", "_HEADERS_MAX"])
def test_an_archive_larger_than_allowed_is_not_unpacked(limit, tmp_path, monkeypatch):
    made = by_hand(tmp_path / "bomb", *(member(f"zeros{n}", size=200_000) for n in range(3)))
    most = {"BYTES_MAX": 500_000, "FILES_MAX": 2, "_HEADERS_MAX": -archive.BYTES_MAX + 300_000}
    monkeypatch.setattr(archive, limit, most[limit])
    with pytest.raises(ArchiveError, match="more than"):
        unpack(made, tmp_path / "work")
    written = sum(p.stat().st_size for p in (tmp_path / "work").iterdir())
    assert written <= 400_000


@given(data=st.data())
def test_an_archive_with_changed_bytes_is_unpacked_or_refused(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    names = fill(root / "a", {"x": bytes(range(256)) * 4, "inner/y": b"1"})
    content = bytearray(packed(root, root / "a", names).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (root / "packed").write_bytes(content)
    with contextlib.suppress(ArchiveError, OSError):
        unpack(root / "packed", root / "b" / "in")
    assert sorted(path.name for path in root.iterdir()) == ["a", "b", "packed"]
    assert [path.name for path in (root / "b").iterdir()] == ["in"]


def test_a_damaged_archive_is_refused(tmp_path):
    archived = packed(tmp_path, tmp_path / "a", fill(tmp_path / "a", {"x": os.urandom(5000)}))
    for content in (archived.read_bytes()[:3000], b"no archive", b""):
        archived.write_bytes(content)
        with pytest.raises(ArchiveError, match="damaged"):
            unpack(archived, tmp_path / f"out{len(content)}")
