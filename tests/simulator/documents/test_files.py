"""Reading files: missing, too large or malformed ones, and values that are rejected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents import files
from simulator.documents.fields import open_table
from simulator.documents.files import load_document, parse_document
from simulator.documents.problems import InputError, Problem, Problems


def problems_of(raw: bytes) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse_document(raw, name="f")
    return [str(problem) for problem in caught.value.problems]


def test_content_decides_the_syntax(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(' \n{"a": {"b": 1}}')
    assert load_document(path).data == {"a": {"b": 1}}
    assert load_document(path).syntax == "json"
    path = tmp_path / "job.json"
    path.write_text("[a]\nb = 1\n")
    assert load_document(path).data == {"a": {"b": 1}}
    assert load_document(path).syntax == "toml"


def test_byte_order_mark_is_ignored() -> None:
    assert parse_document(b"\xef\xbb\xbfa = 1\n", name="f").data == {"a": 1}


def test_missing_file_suggests_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("a = 1")
    with pytest.raises(InputError) as caught:
        load_document(tmp_path / "clustr.toml")
    (problem,) = caught.value.problems
    assert problem.place == "clustr.toml"
    assert "there is no file" in problem.what
    assert problem.cure == 'did you mean "cluster.toml"?'


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no directory"):
        load_document(tmp_path / "nowhere" / "job.toml")


def test_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory; name a file inside it"):
        load_document(tmp_path)


def test_impossible_path_is_an_input_error(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(InputError):
            load_document(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("a = 1")
    path.chmod(0)
    with pytest.raises(InputError, match="no permission to read"):
        load_document(path)


def test_read_error_is_reported() -> None:
    source = Path("/proc/self/mem")  # it opens, and its first page is unmapped
    if not source.exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(InputError, match="mem: cannot be read"):
        load_document(source)


def test_file_above_the_limit_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as stream:
        stream.truncate(100 * 2**20)  # sparse: it takes no space
    with pytest.raises(InputError, match="larger than 32 MiB"):
        load_document(path)


def test_file_at_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 5)
    (tmp_path / "f").write_text("a = 1")
    assert load_document(tmp_path / "f").data == {"a": 1}
    (tmp_path / "f").write_text("a = 12")
    with pytest.raises(InputError, match="larger than"):
        load_document(tmp_path / "f")


def test_toml_has_a_lower_limit_than_json() -> None:
    large = b"#" * (2 * 2**20)
    with pytest.raises(InputError, match="TOML above 2 MiB is not read"):
        parse_document(large + b"\na = 1", name="f")
    assert parse_document(large[:-10] + b"\na = 1", name="f").data == {"a": 1}
    assert parse_document(b'{"a": 1' + b" " * len(large) + b"}", name="f").data == {"a": 1}


@pytest.mark.parametrize(
    ("raw", "place", "what"),
    [
        (b"a = 1\nb = '\xff'\n", "f: line 2", "is not UTF-8: byte 0xff at offset 11"),
        (b"\xef\xbb\xbfa = '\xc3", "f: line 1", "is not UTF-8: byte 0xc3 at offset 8"),
        (b"", "f", "is empty"),
        (b" \n\t", "f", "is empty"),
        (b"a = 1\nb 2\n", "f: line 2, column 3", "is not valid TOML: Expected '=' after a key"),
        (b"a = [1,", "f: line 1, the end of the file", "is not valid TOML"),
        (b'{"a": 1,\n "b" 2}', "f: line 2, column 6", "is not valid JSON: Expecting ':'"),
        (b"[1, 2]", "f", "holds a bare JSON value"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "f", "holds a number with far too many digits"),
        (b"a = 1" + b"0" * 5000, "f", "is not valid TOML"),
        (b'{"a": ' + b"[" * 100_000, "f", "is nested too deeply"),
        (b"a = " + b"[" * 100_000, "f", "is nested too deeply"),
        (b'{"a": ' + b"[" * 50 + b"]" * 50 + b"}", "f: a", "is nested too deeply"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_syntax_error_is_reported_with_its_place(raw: bytes, place: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_document(raw, name="f")
    problem = caught.value.problems[0]
    assert problem.what.startswith(what)
    assert problem.place.startswith(place)


def test_non_finite_numbers_are_reported() -> None:
    assert problems_of(b'{"a": NaN, "b": [1.0, -Infinity], "c": {"d": 1e999}}') == [
        "f: a: is NaN; give a finite number",
        "f: b[1]: is -Infinity; give a finite number",
        "f: c.d: is Infinity; give a finite number",
    ]
    assert problems_of(b"[t]\na = nan\n[[p]]\nb = 1\n[[p]]\nb = inf") == [
        "f: [t] a: is NaN; give a finite number",
        "f: [[p]] 2: b: is Infinity; give a finite number",
    ]


def test_repeated_key_is_reported() -> None:
    assert problems_of(b'{"a": {"b": 1, "c": 2, "b": 3}}') == [
        "f: a.b: is given more than once; keep one of them"
    ]


def test_invalid_unicode_is_rejected() -> None:
    assert [p.partition(";")[0] for p in problems_of(rb'{"a": "\ud800", "\udfff": 1}')] == [
        "f: a: is '\\ud800', which is not valid Unicode",
        "f: has the key '\\udfff', which is not valid Unicode",
    ]


def test_number_of_listed_mistakes_is_limited() -> None:
    assert len(problems_of(b'{"a": [' + b"NaN," * 9999 + b"NaN]}")) <= 51


def test_flaws_and_wrong_values_are_reported_together() -> None:
    document = parse_document(b'{"a": NaN, "b": "x"}', name="f", flaws_raise=False)
    problems = Problems()
    table = open_table(document, problems)
    table.number("a", default=1.0)
    table.integer("b", required=True)
    table.text("c", required=True)
    table.finish()
    assert problems.found == [
        Problem("f: a", "is NaN", "give a finite number"),  # once, although it was asked for
        Problem("f: b", 'is "x"', "give a positive whole number"),
        Problem("f: c", "is missing", "give a text"),
    ]


def test_booleans_are_not_numbers_and_floats_are_not_integers() -> None:
    problems = Problems()
    raw = b'{"a": true, "b": true, "c": 8.0, "d": 99999999999999999999, "e": 3}'
    table = open_table(parse_document(raw, name="f"), problems)
    assert table.integer("a") is None
    assert table.number("b") is None
    assert table.integer("c") is None
    assert table.integer("d") is None
    assert table.number("e") == 3.0
    assert [problem.place for problem in problems.found] == ["f: a", "f: b", "f: c", "f: d"]


def test_unknown_key_suggests_a_known_one() -> None:
    problems = Problems()
    table = open_table(parse_document(b"prcision = 1", name="f"), problems)
    table.choice("precision", ("fp32",), default="fp32")
    table.finish()
    assert problems.found == [
        Problem("f", 'has an unknown key "prcision"', 'did you mean "precision"?')
    ]


@pytest.mark.chaos
@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_rejected(raw: bytes) -> None:
    try:
        document = parse_document(raw, name="f")
    except InputError as error:
        str(error).encode()
    else:
        assert isinstance(document.data, dict)


@pytest.mark.chaos
@given(st.text(alphabet='{}[]",:=.#\n\\u0d8e1-+nNaIi ', max_size=60))
def test_near_miss_is_parsed_or_rejected(text: str) -> None:
    try:
        parse_document(text.encode(), name="f")
    except InputError as error:
        str(error).encode()
