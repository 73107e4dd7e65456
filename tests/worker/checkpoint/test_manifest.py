"""The file of a manifest, as every reader reads it."""

from __future__ import annotations

import json

import pytest

from worker.checkpoint.manifest import ManifestError, hash_of, older, read_fields

NEWEST_FIRST = [((3, 5), "e"), ((2, 15), "d"), ((1, 30), "c"), ((1, 20), "b"), ((1, 10), "a")]


def test_older_checkpoints_are_of_an_earlier_step_and_no_later_generation():
    found = list(reversed(NEWEST_FIRST))
    assert [name for _, name in older(found, (2, 20))] == ["d", "a"]
    assert [name for _, name in older(found, (1, 30))] == ["b", "a"]
    assert older(found, None) == NEWEST_FIRST


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"step": 1', "it is truncated or damaged"),
        (b"\xff", "it is not a manifest"),
        (b"[1]", "it is not a manifest"),
        (b"{}", "it is not a manifest"),
        (b'{"sha256": "0"}', "it was changed: its hash does not match"),
        (b'{"format": 2, "sha256": ""}', "it has format 2; this version reads 1"),
    ],
)
def test_what_is_no_manifest_of_this_format_is_refused(data: bytes, told: str):
    with pytest.raises(ManifestError, match=told):
        read_fields(data, name="it")


def test_a_field_that_this_version_does_not_know_is_part_of_the_hash():
    fields = {"new": {"b": 1, "a": [None]}, "objects": []}
    signed = {**fields, "sha256": hash_of(fields)}
    assert read_fields(json.dumps(signed, indent=1).encode(), name="it") == signed
