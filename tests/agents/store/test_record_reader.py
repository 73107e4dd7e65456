"""Records are decoded once for each revision."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.codec import encode, plain
from agents.protocol.compression import pack
from agents.protocol.records import JobId, JobRecord
from agents.store.interface import Entry
from agents.store.record_reader import RecordReader

JOB = JobRecord(JobId("job"), "queued")
FIRST = Entry("a", encode(JOB), 1, 1)
NEXT = replace(FIRST, value=pack(encode(replace(JOB, state="running"))), modified=2)
BROKEN = Entry("b", b"nothing", 3, 3)


def test_a_record_is_decoded_again_once_it_has_changed() -> None:
    reader, faults = RecordReader(), dict[str, str]()
    (one,) = reader.read(JobRecord, [FIRST], faults)
    (same,) = reader.read(JobRecord, [FIRST], faults)
    assert same is one
    (changed,) = reader.read(JobRecord, [NEXT], faults)
    assert (one, changed) == (JOB, replace(JOB, state="running"))
    reader.clear()
    (other,) = reader.read(JobRecord, [replace(FIRST, modified=2)], faults)
    assert other == JOB, "in a store that was set back, a revision means another record"
    assert faults == {}


def test_an_unreadable_record_is_left_out_and_named_each_time() -> None:
    reader = RecordReader()
    for _ in range(2):
        faults = dict[str, str]()
        assert reader.read(JobRecord, [BROKEN, FIRST], faults) == [JOB]
        assert list(faults) == ["b"]
        assert "JSON" in faults["b"]


def test_records_that_are_deleted_are_forgotten() -> None:
    reader = RecordReader((JobRecord,))
    later = replace(FIRST, value=encode(plain(JOB) | {"new": 1}))
    (one,) = reader.read(JobRecord, [later], {})
    assert reader.newer == {"a": {"new": 1}}
    reader.keep_only([later])
    assert reader.newer == {"a": {"new": 1}}
    reader.keep_only([BROKEN])
    assert reader.newer == {}
    (again,) = reader.read(JobRecord, [later], {})
    assert again is not one


def test_fields_of_a_newer_version_are_kept_for_kinds_that_are_rewritten_alone() -> None:
    later = replace(FIRST, value=encode(plain(JOB) | {"new": 1}))
    reader = RecordReader()
    assert reader.read(JobRecord, [later], {}) == [JOB]
    assert reader.newer == {}
    reader = RecordReader((JobRecord,))
    reader.read(JobRecord, [later], {})
    reader.read(JobRecord, [replace(FIRST, modified=2)], {})
    assert reader.newer == {}, "the newer version wrote it anew without them"
