"""Records and messages of every protocol so far are read; those of a later one are passed over.

``protocol/N`` holds what the code that first spoke protocol N wrote, one file per kind. They are
written once, with SAILOR_RETELL=1, and never again.
"""

from __future__ import annotations

import hashlib
import json
import os
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol import codec, versions
from sailord.checkpoints.manifest import Manifest, manifest_bytes, read_manifest
from tests.recorded.record_kinds import KINDS, example, hints_of
from worker.checkpoint.manifest import FORMAT, ManifestError

HERE = Path(__file__).parent / "protocol"
FILES = sorted(HERE.glob("*/*.json"))
NEW = {"text": "of a later version", "list": [1, None, {"deep": True}]}


def test_this_protocol_is_on_record():
    """Each kind has a file; a kind that was added later gets one with the next number."""
    folder = HERE / str(versions.SPEAKS)
    if os.environ.get("SAILOR_RETELL") and not folder.exists():
        folder.mkdir()
        for name, kind in KINDS.items():
            raw = codec.plain(example(kind))
            (folder / f"{name}.json").write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    assert folder.exists(), "SAILOR_RETELL=1 writes it"


def test_files_are_kept_for_every_understood_protocol():
    """Files of older protocols are deleted."""
    numbers = sorted(int(folder.name) for folder in HERE.iterdir())
    assert numbers == list(range(max(versions.UNDERSTANDS_FROM, 1), versions.SPEAKS + 1))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recorded_records_are_read_whole(file: Path):
    """Each field still has its name and its meaning: none is passed over."""
    raw = json.loads(file.read_text(encoding="utf-8"))
    assert _of(codec.plain(codec.read(KINDS[file.stem], raw)), raw) == raw


def _of(now: Any, then: Any) -> Any:
    """Return the part of a present value that the recorded one has."""
    if isinstance(then, dict):
        return {name: _of(now.get(name), each) for name, each in then.items()}
    if isinstance(then, list):
        return [_of(*pair) for pair in zip(now, then, strict=True)]
    return now


# ---- a later version --------------------------------------------------------------------------


def with_new_fields(raw: Any) -> Any:
    """Return the JSON with a field more at every level."""
    if isinstance(raw, dict):
        return {name: with_new_fields(each) for name, each in raw.items()} | {"new": NEW}
    return [with_new_fields(each) for each in raw] if isinstance(raw, list) else raw


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_unknown_fields_are_passed_over_at_every_level(kind: Any):
    record = example(kind)
    later = with_new_fields(codec.plain(record))
    assert codec.read(kind, later) == record


@pytest.mark.parametrize("name", ["NodeRecord", "GenerationRecord", "JobRecord", "Order", "Report"])
def test_any_record_with_any_new_fields_is_read(name: str):
    kind = KINDS[name]
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )

    @given(st.from_type(kind), st.data())
    def is_read(record: object, data: st.DataObject) -> None:
        try:
            raw = json.loads(codec.encode(record))
        except ValueError:
            return  # A number that is not finite.

        def add(value: Any) -> Any:
            if isinstance(value, list):
                return [add(each) for each in value]
            if not isinstance(value, dict):
                return value
            more = data.draw(st.dictionaries(st.text().map("new-{}".format), anything, max_size=2))
            return {key: add(each) for key, each in value.items()} | more

        assert codec.read(kind, add(raw)) == record

    is_read()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_a_later_version_added_stays_when_the_record_is_written_anew(kind: Any):
    later = with_new_fields(codec.plain(example(kind)))
    data = json.dumps(later).encode()
    keeping = codec.unknown_fields(kind, data)
    again = json.loads(codec.encode(codec.decode(kind, data), keeping))
    assert again == _without_new_in_lists(later)


def _without_new_in_lists(raw: Any, *, is_in_list: bool = False) -> Any:
    if isinstance(raw, list):
        return [_without_new_in_lists(each, is_in_list=True) for each in raw]
    if not isinstance(raw, dict):
        return raw
    return {
        name: each if name == "new" else _without_new_in_lists(each, is_in_list=is_in_list)
        for name, each in raw.items()
        if name != "new" or not is_in_list
    }


def _literals(kind: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where a record has one of a few words."""
    kind = getattr(kind, "__supertype__", kind)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        yield at
    elif typing.get_origin(kind) is tuple:
        places = range(sum(each is not Ellipsis for each in inner))
        for place in places:
            yield from _literals(inner[place], (*at, place))
    elif inner:
        yield from _literals(inner[0], at)
    elif hasattr(kind, "__dataclass_fields__"):
        for name in kind.__dataclass_fields__:
            yield from _literals(hints_of(kind)[name], (*at, name))


WORDS = [(name, at) for name, kind in KINDS.items() for at in _literals(kind)]


@pytest.mark.parametrize(("name", "at"), WORDS, ids=str)
def test_unknown_literal_is_named_with_its_place(name: str, at: tuple[str | int, ...]):
    raw = codec.plain(example(KINDS[name]))
    *way, last = at
    inner = raw
    for step in way:
        inner = inner[step]
    inner[last] = "hibernating"
    with pytest.raises(codec.WireError, match=f'{last}.*"hibernating" is not one of'):
        codec.read(KINDS[name], raw)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_needs_a_later_protocol_is_refused_with_the_cure(kind: Any):
    raw = codec.plain(example(kind))
    assert codec.read(kind, raw | {versions.NEEDS: versions.SPEAKS}) == example(kind)
    with pytest.raises(codec.WireError, match="upgrade this machine first"):
        codec.read(kind, raw | {versions.NEEDS: versions.SPEAKS + 1})


def test_manifest_with_new_fields_is_not_taken_for_a_damaged_one():
    data, _ = manifest_bytes(replace(example(Manifest), format=FORMAT))
    later = json.loads(data) | {"new": NEW}
    sha256 = hashlib.sha256(codec.encode(later | {"sha256": ""})).hexdigest()
    signed = codec.encode(later | {"sha256": sha256})
    assert read_manifest(signed, name="it").sha256 == sha256
    with pytest.raises(ManifestError, match="was changed"):
        read_manifest(signed.replace(b"of a later version", b"of another author!"), name="it")


def test_who_must_be_upgraded_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(versions, "SPEAKS", 3)
    monkeypatch.setattr(versions, "UNDERSTANDS_FROM", 2)

    def why(speaks: int, understands_from: int) -> str:
        other = versions.Protocol(speaks, understands_from)
        return versions.why_incompatible(other, other_is="its agent", this_is="sailord")

    assert [why(3, 2), why(2, 1), why(4, 3)] == ["", "", ""]
    assert why(1, 0) == (
        "its agent speaks protocol 1, and sailord understands 2 and later: upgrade its agent first"
    )
    assert why(5, 4) == (
        "its agent understands protocol 4 and later, and sailord speaks 3: upgrade sailord first"
    )
