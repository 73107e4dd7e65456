"""Sailord's logs become one trace, also where a crash or a disk has damaged lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from simulator.traces.sailord_log import counts_over_time, damage_of, read_lines


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


def own_lines(*entries: tuple[float, int]) -> str:
    return "".join(
        json.dumps({"at": at, "gpus": {"V100-16@us-east1-b spot": gpus}}) + "\n"
        for at, gpus in entries
    )


def test_logs_of_successive_leaders_are_one_trace(tmp_path: Path) -> None:
    """The GPUs that both counted are no more than those of one."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(own_lines((1_000_000, 16), (1_000_100, 8)))
    second.write_text(own_lines((1_000_050, 16), (1_000_200, 16), (1_000_300, 8)))
    save = str(tmp_path / "trace.json")
    code, told = run("trace", "import", str(second), str(first), "--save", save)
    assert code == 0, told
    document = json.loads(Path(save).read_text())
    points = [(each["time_s"], each["available"][0]["gpus"]) for each in document["points"]]
    assert points == [(0, 16), (100, 8), (200, 16)]
    assert document["end_s"] == 300
    assert document["starts_at"] == "1970-01-12T13:46:40+00:00"


def counts_of(*texts: str) -> list[tuple[float, int]]:
    points = counts_over_time(map(read_lines, texts))
    return [(at_s, sum(counts.values())) for at_s, counts in points]


def test_a_line_cut_at_any_byte_is_left_out_and_the_trace_ends_before_it() -> None:
    whole = own_lines((1000, 16), (1060.5, 8), (1120, 24))
    begins = whole.index('{"at": 1120')
    for size in range(begins, len(whole) - 1):
        assert counts_of(whole[:size]) == [(1000, 16), (1060.5, 8)]
        assert len(damage_of("log", read_lines(whole[:size]))) == (size > begins)
    assert counts_of(whole[:-1])[-1] == (1120, 24)


@pytest.mark.parametrize(("before", "after"), [(16, 24), (24, 16)])
def test_what_a_damaged_line_counted_is_at_most_its_neighbours(before: int, after: int) -> None:
    """Cut at any byte; before its own time the counts of the line before hold, if it is known."""
    damaged, next_ = own_lines((1060.5, 99)), own_lines((1120, after))
    for size in range(1, len(damaged) - 2):
        is_time_known = size > len('{"at": 1060.5')
        points = counts_of(own_lines((1000, before)) + damaged[:size] + "\n" + next_)
        at_s = 1060.5 if is_time_known else 1000
        assert points == [(1000, before), (at_s, 16), (1120, after)]


def test_the_time_of_a_damaged_line_counts_between_its_neighbours_only() -> None:
    for at in (500, 2000):
        text = own_lines((1000, 16)) + f'{{"at": {at}, "gp\n' + own_lines((1120, 8))
        assert counts_of(text) == [(1000, 16), (1000, 8), (1120, 8)]


def test_damage_at_the_start_is_left_out() -> None:
    assert counts_of('{"at"\n' + own_lines((1000, 16), (1060, 8))) == [(1000, 16), (1060, 8)]
    assert counts_of('{"at": 900, \n' + own_lines((1000, 16))) == [(1000, 16)]


def test_the_next_leaders_log_ends_what_a_cut_line_leaves_unknown() -> None:
    first = own_lines((1000, 16)) + '{"at": 1060, "gpus": {"V1'
    assert counts_of(own_lines((1200, 8), (1300, 16)), first) == [
        (1000, 16), (1060, 8), (1200, 8), (1300, 16)
    ]  # fmt: skip


def test_damaged_lines_of_own_logs_are_told_with_file_and_line(tmp_path: Path) -> None:
    log, save = tmp_path / "b.jsonl", tmp_path / "trace.json"
    log.write_bytes(
        own_lines((1000, 16)).encode()
        + b'\xff\x00{"at": 1\n'
        + own_lines((1200, 8), (1260, 8)).encode()
        + b'{"at": 1300, "g'
    )
    code, told = run("trace", "import", str(log), "--save", str(save))
    assert code == 0, told
    assert f"warning: {log}: line 2 is left out, not valid JSON" in told
    assert "until line 3 each pool has the lesser count of before and after" in told
    assert f"warning: {log}: line 5 is left out, not valid JSON" in told
    assert "the counts after the line before it are unknown" in told
    document = json.loads(save.read_text())
    assert [point["time_s"] for point in document["points"]] == [0]
    assert document["points"][0]["available"][0]["gpus"] == 8
    assert document["end_s"] == 260
    assert len(document["conventions"]) == 2
    log.write_text("x\n" * 20 + own_lines((1000, 16), (1200, 8)))
    code, told = run("trace", "import", str(log), "--save", str(save))
    assert (code, told.count("is left out"), "so are 15 more damaged lines" in told) == (0, 5, True)


def test_a_log_of_damage_only_is_refused_by_its_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(own_lines((1_000_000, 16), (1_000_100, 8)))
    second.write_text('{"at": 10')
    save = tmp_path / "trace.json"
    code, told = run("trace", "import", str(first), str(second), "--save", str(save))
    assert (code, save.exists()) == (2, False)
    assert f"{second}: has no line that can be read: line 1 is not valid JSON" in told
    assert "a.jsonl" not in told


def test_the_older_file_beside_a_log_is_read_too(tmp_path: Path) -> None:
    log, save = tmp_path / "availability.jsonl", tmp_path / "trace.json"
    (tmp_path / "availability.jsonl.1").write_text(own_lines((1000, 16)))
    log.write_text(own_lines((1100, 8), (1200, 8)))
    for files in ([str(log)], [str(log), f"{log}.1"]):
        code, told = run("trace", "import", *files, "--save", str(save))
        assert code == 0, told
        document = json.loads(save.read_text())
        assert document["source"] == "availability.jsonl, availability.jsonl.1"
        assert [point["time_s"] for point in document["points"]] == [0, 100]
