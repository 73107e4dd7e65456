"""Encoding and decoding of records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol import codec
from agents.protocol.records import Durable, GenerationRecord, JobRecord, NodeRecord, Order, Report

RECORDS = (NodeRecord, GenerationRecord, Report, Durable, JobRecord, Order)


@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_survives_encoding(kind: type) -> None:
    @given(st.from_type(kind).filter(_is_finite))
    def comes_back(record: object) -> None:
        assert codec.decode(kind, codec.encode(record)) == record

    comes_back()


def _is_finite(record: object) -> bool:
    try:
        codec.encode(record)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b'{"id":"a"}', "target is missing|kind is missing"),
        (b'{"id":1,"kind":"drain","target":"a"}', r"Order\.id: 1 is not a string"),
        (b'{"id":"a","kind":"explode","target":"a"}', "not one of preempt"),
        (b'{"id":"a","kind":"drain","target":"a","leaves_at":"now"}', "leaves_at"),
        (b'{"id":"a","kind":"drain","target":"a","leaves_at":NaN}', "NaN is not a number"),
        (b'{"id":"a","kind":"drain","target":"a","leaves_at":true}', "true is not a number"),
        (b'{"id":"a","kind":"drain","target":"a","leaves_at":1e999}', "not finite"),
        (b'{"id":"a","kind":"drain","target":"a","leaves_at":1' + b"0" * 400 + b"}", "too large"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_invalid_data_is_refused_with_its_place(data: bytes, where: str) -> None:
    with pytest.raises(codec.WireError, match=where):
        codec.decode(Order, data)


def test_equal_records_give_equal_bytes() -> None:
    one = Order(id="a", kind="drain", target="b")
    assert codec.encode(one) == codec.encode(codec.decode(Order, codec.encode(one)))
    assert b" " not in codec.encode(one)
