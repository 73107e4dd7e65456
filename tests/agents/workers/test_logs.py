"""Reading the output of workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agents.daemon import bounded_file
from agents.daemon.bounded_file import BLOCK_BYTES, bound, own_log
from agents.protocol.records import Output, OutputPart
from agents.workers.logs import BYTES_MAX, MARK, read_ended, read_output


def process(folder: Path, name: str, text: str | bytes = b"") -> Path:
    path = folder / name / "output"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)
    return path


def texts(output: Output) -> dict[int, str]:
    return {part.rank: part.text for part in output.parts}


def test_followed_output_comes_complete_and_once(tmp_path: Path) -> None:
    outputs = {0: process(tmp_path, "j.1.0"), 1: process(tmp_path, "j.1.1", "hello\n")}
    said, mark = {0: "", 1: ""}, ""
    for number in range(50):
        process(tmp_path, f"j.1.{number % 2}", f"line {number}\n" * (number % 7))
        found = read_output(outputs, None, mark)
        mark = found.mark
        for rank, text in texts(found).items():
            said[rank] += text
    assert said == {rank: path.read_text() for rank, path in outputs.items()}
    assert read_output(outputs, None, mark).parts == ()


def test_long_output_is_split_over_answers(tmp_path: Path) -> None:
    path = process(tmp_path, "j.1.0", "first\n")
    mark = read_output({0: path}, 0, "").mark
    process(tmp_path, "j.1.0", "x" * (BYTES_MAX + 10))
    sizes = []
    for _ in range(3):
        found = read_output({0: path}, 0, mark)
        sizes.append(len("".join(texts(found).values())))
        mark = found.mark
    assert sizes == [BYTES_MAX, 10, 0]


def test_the_end_of_long_output_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = process(tmp_path, "j.1.0", "".join(f"line {n}\n" for n in range(60_000)))
    (text,) = texts(read_output({0: path}, None, "")).values()
    assert text.startswith("line ")
    assert text.endswith("line 59999\n")
    assert BYTES_MAX - 20 < len(text) <= BYTES_MAX


def test_an_incomplete_character_is_left_for_the_next_answer(tmp_path: Path) -> None:
    path = process(tmp_path, "j.1.0", "é".encode()[:1])
    first = read_output({0: path}, None, "")
    process(tmp_path, "j.1.0", "é".encode()[1:] + b"\n\xff\n")
    assert first.parts == ()
    assert texts(read_output({0: path}, None, first.mark)) == {0: "é\n\ufffd\n"}


def test_the_output_of_a_ranks_next_process_is_read_from_its_beginning(tmp_path: Path) -> None:
    mark = read_output({0: process(tmp_path, "j.1.0", "old\n")}, None, "").mark
    outputs = {0: process(tmp_path, "j.2.0", "new\n"), 1: process(tmp_path, "j.2.1", "more\n")}
    assert texts(read_output(outputs, None, mark)) == {0: "new\n", 1: "more\n"}


def test_a_file_that_is_made_anew_is_followed_from_its_beginning(tmp_path: Path) -> None:
    """As the log of a setup that is tried once more."""
    path = process(tmp_path, "key", "a first attempt\n")
    mark = read_output({0: path}, None, "").mark
    path.unlink()
    process(tmp_path, "key", "again\n")
    assert texts(read_output({0: path}, None, mark)) == {0: "again\n"}
    mark = read_output({0: path}, None, mark).mark
    path.unlink()
    mark = read_output({0: path}, None, mark).mark
    process(tmp_path, "key", "and a longer attempt\n")
    assert texts(read_output({0: path}, None, mark)) == {0: "and a longer attempt\n"}


def test_all_ranks_are_listed_whichever_is_requested(tmp_path: Path) -> None:
    outputs = {0: process(tmp_path, "j.1.0", "a\n"), 3: tmp_path / "gone" / "output"}
    found = read_output(outputs, 77, "")
    assert (found.ranks, found.parts) == ((0, 3), ())
    assert texts(read_output(outputs, None, "")) == {0: "a\n"}


@pytest.mark.parametrize("mark", ["", "0:j.1.0:12", "0:j.1.0:12,11:a_b-c.2.11:0"])
def test_valid_marks_are_accepted(mark: str) -> None:
    assert MARK.match(mark)


@pytest.mark.parametrize(
    "mark", ["0", "0:../x:1", "0:j:1,", ",0:j:1", "0:j:-1", "x:j:1", "0:j:1\n"]
)
def test_invalid_marks_are_refused(mark: str) -> None:
    assert not MARK.match(mark)


def test_an_endless_log_keeps_its_last_lines_and_its_offsets(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bounded_file, "DISK_BYTES_MAX", 300_000)
    monkeypatch.setattr(bounded_file, "KEPT_BYTES", 100_000)
    path = process(tmp_path, "j.1.0", "first\n")
    mark = read_output({0: path}, 0, "").mark
    written = 0
    with path.open("ab") as worker:  # It has the file open all the time.
        for number in range(100_000):
            written += worker.write(f"line {number}\n".encode())
            if number % 10_000 == 9_999:
                worker.flush()
                bound(path)
                assert path.stat().st_blocks * 512 <= 300_000 + BLOCK_BYTES
    assert path.stat().st_size == written + len("first\n")
    said = ""
    while parts := texts(found := read_output({0: path}, 0, mark)):
        said += parts[0]
        mark = found.mark
    assert "\0" not in said.lstrip("\0")
    assert said.endswith("line 99998\nline 99999\n")
    assert 100_000 <= len(said.lstrip("\0")) <= 300_000
    assert texts(read_output({0: path}, 0, ""))[0].endswith("line 99999\n")


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    path = process(tmp_path, "j.1.0", "first\n")
    bound(path)
    assert path.read_text() == "first\n"


def test_the_log_of_a_process_outside_systemd_is_bounded_too(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "head.log"
    with path.open("a") as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert list(own_log()) == [path]
    with open(os.devnull, "w") as nothing:
        monkeypatch.setattr(sys, "stderr", nothing)
        assert list(own_log()) == []


def test_output_of_ended_workers_says_which_it_was_and_how_it_ended(tmp_path: Path) -> None:
    homes = [process(tmp_path, name, "step 1\n").parent for name in ("a.job.2.0", "j.3.1")]
    (homes[0] / "exit").write_text("-9")
    first = "==> rank 0 of a.job, begun in generation 2, was killed by signal 9 <==\nstep 1\n"
    second = "==> rank 1 of j, begun in generation 3, ended with an unknown exit code <==\nstep 1\n"
    assert read_ended(homes) == Output((), (OutputPart(0, first), OutputPart(1, second)), "", 2)
    assert read_ended([]) == Output((), (), "")
