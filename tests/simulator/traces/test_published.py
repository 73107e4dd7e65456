"""Published logs become traces; a file in none of the formats gets an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from simulator.documents.problems import InputError
from simulator.traces.published import LogFile, format_of, merged, series_of, trace_document

POOL = "V100-16@us-east-1c"
EVENTS = "0,add,a\n0,add,b\n60000,add,c\n120000,remove,a\n180000,add,d\n180000,remove,b\n"
DATES = "2021-12-11, 11:11:30, 5\n2021-12-11, 11:13:10, 5\n2021-12-12, 11:11:30, 7\n"
COUNTS = "0,1\n0,2\n60000,3\n120000,2\n"
SEGMENT = """\
[0, "add", {"nodes": ["n0", "n1"], "duration": 60000, "liveput_truth_strategy": [5, 3]}]
[60000, "no-op", {"nodes": [], "duration": 60000}]
[120000, "remove", {"nodes": ["n1"], "duration": 60000}]
[180000, "migration", {"nodes": [], "duration": 60000}]
"""
DATED = (
    "timestamp,count\n2021-07-26T18:42:00Z,8\n2021-07-26T18:45:00Z,11\n2021-07-26 18:47:00,0.0\n"
)
SKYPILOT = json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 1, 1, 0]})
OWN = (
    '{"at": 1000.5, "gpus": {"V100-16@us-east-1c": 8}}\n'
    '{"at": 1060.5, "gpus": {"V100-16@us-east-1c": 8, "A100-40@a spot": 4}}\n'
    '{"at": 1120.5, "gpus": {}}\n'
)


def read(text: str, gpus: int = 1) -> tuple[list[tuple[float, int]], float]:
    series = series_of(LogFile("log", text, POOL, gpus))
    return [(at_s, sum(counts.values())) for at_s, counts in series.points], series.end_s


@pytest.mark.parametrize(
    ("text", "kind", "points", "end_s"),
    [
        (EVENTS, "bamboo-events", [(0, 2), (60, 3), (120, 2), (180, 2)], 240),
        (DATES, "bamboo-counts", [(0, 5), (86400, 7)], 86400),
        (DATED, "dated-counts", [(0, 8), (180, 11), (300, 0)], 420),
        (COUNTS, "counts", [(0, 2), (60, 3), (120, 2)], 180),
        (SEGMENT, "parcae", [(0, 2), (120, 1)], 240),
        (SKYPILOT, "skypilot", [(0, 0), (300, 1), (900, 0)], 1200),
        (OWN, "sailord", [(0, 8), (60, 12), (120, 0)], 120),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
def test_published_formats_are_read(
    text: str, kind: str, points: list[tuple[float, int]], end_s: float
) -> None:
    assert format_of(LogFile("log", text, POOL, 1)) == kind
    assert read(text) == (points, end_s)
    if kind != "sailord":
        assert read(text, gpus=8)[0] == [(at_s, 8 * gpus) for at_s, gpus in points]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "log: is empty"),
        ("\n \n", "log: is empty"),
        ("time,nodes\n", 'log: begins with "time,nodes", which no known format does'),
        ("0;1\n60000;2\n", "give a log of lines like `60000,add,node-1` or"),
        ("[1,2,3]", "no known format"),
        ('{"points": [{"time_s": 0}]}', "log: is a trace already; give it to `sailorctl replay`"),
        ("a,b,c,d", "no known format"),
        ("0,add,a\n60,remove,b", "could not be read as bamboo-events"),
        ("0,add,a\n60000,remove,b", 'as bamboo-events: "b" is removed, and was not added'),
        ("0,add,a\n60,renew,a", '"renew" is neither add nor remove'),
        ('{"metadata": {}, "data": [1]}', "could not be read as skypilot: it has no metadata"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "has no entry"),
        ("1,2\n3,x", "log: line 2: could not be read as counts: x is not a number of nodes"),
        ("n,t\n\n1,2\n3,x", "log: line 4: could not be read as counts"),
        ("1,2\n3,4,5", "log: line 2: could not be read as counts: has 3 values, instead of TIME,"),
        ("two,1\n60000,2", 'log: line 1: could not be read as counts: "two" is not a time'),
        ("-5,1\n60000,2", 'log: line 1: could not be read as counts: "-5" is not a time'),
        ("nan,1\n60000,2", 'log: line 1: could not be read as counts: "nan" is not a time'),
        (
            "2021-13-45 11:00:00,5",
            'line 1: could not be read as dated-counts: "2021-13-45 11:00:00"',
        ),
        ('[0, "add", {"nodes": ["a"], "duration": 9}]\n[1]', "line 2: could not be read as parcae"),
        ('[0, "add", {"nodes": ["a"]}]', "could not be read as parcae"),
        # In milliseconds.
        ('{"at": 1767225600000, "gpus": {}}', "no line that can be read: line 1 is 1.76723e+12 s"),
        ('{"at": NaN, "gpus": {}}', "line 1 is nan s"),
        ('{"at": -5, "gpus": {}}\n{"at": -3, "gpus": {}}', "-5 s is not a time"),
        ('{"at": "noon", "gpus": {}}', "line 1 is not of the form"),
        ('{"at": 1, "gpus": {"V100-16": 8}}', '"V100-16" is not a pool'),
        (
            '{"at": 1, "gpus": {"V100-16@a": 1' + "0" * 400 + "}}",
            "is not a number of nodes or GPUs",
        ),
        ('{"metadata": {"gap_seconds": Infinity}, "data": [1]}', "could not be read as skypilot"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1e999]}', "inf is not a number of nodes"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 0.9]}', "0.9 is not a number of nodes"),
        ('{"metadata": ' + "[" * 100_000, "could not be read as skypilot"),
        ("0,1\n60000,-2\n", "-2 is not a number of nodes"),
        (f"0,1\n{'9' * 400},2\n", "inf s is not a time"),
        ('{"at": 1, "gpus": {"V100-16@a": -8}}', "-8 is not a number of nodes or GPUs"),
        ('{"at": 1, "gpus": {"V100-16@a": null}}', "None is not a number of nodes or GPUs"),
        ('{"at": 1, "gpus": [8]}', "line 1 is not of the form"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_files_of_unknown_formats_are_mistakes(text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text)
    assert told in str(caught.value.problems[0])


@pytest.mark.parametrize(
    "text",
    [
        "0,4\n20000,8\n10000,2\n30000,4\n",
        "0,add,a\n20000,add,b\n10000,add,c\n",
        "2021-12-11, 11:13:10, 5\n2021-12-11, 11:11:30, 5\n2021-12-12, 11:11:30, 7\n",
        SEGMENT.replace("[60000,", "[160000,"),
    ],
)
def test_a_log_that_goes_back_in_time_is_a_mistake(text: str) -> None:
    with pytest.raises(InputError, match=r"line [23]: is earlier than the line before"):
        read(text)


SECONDS = "0,0\n21529,0\n21529,4\n21556,4\n21556,12\n88194,7\n"
HOURS = "0.000,0\n5.980,0\n5.980,4\n24.498,7\n"
"""As Bamboo published them, beside others in milliseconds."""


@pytest.mark.parametrize(
    ("text", "unit", "hours"),
    [
        (SECONDS, "s", 24.5),
        (HOURS, "h", 30.5),
        ("0,add,a\n41093,add,b\n68252,remove,b\n", "s", 26.5),
        (EVENTS, "min", 4000.0),
    ],
)
def test_times_that_are_no_plausible_milliseconds_need_a_unit(
    tmp_path: Path, text: str, unit: str, hours: float
) -> None:
    log, save = tmp_path / "log.csv", tmp_path / "trace.json"
    log.write_text(text)
    words = ("trace", "import", str(log), "--pool", POOL, "--save", str(save))
    code, told = run(*words)
    if text == EVENTS:
        assert (code, "its times are read as ms" in told) == (0, True)
    else:
        assert (code, save.exists()) == (2, False)
        assert "say their unit with --unit (ms, s, min, h)" in told
    code, told = run(*words, "--unit", unit)
    assert code == 0, told
    assert f"its times are read as {unit}" in told
    document = json.loads(save.read_text())
    assert document["end_s"] / 3600 == pytest.approx(hours, rel=0.05)
    assert document["conventions"] == [told.splitlines()[0]]


def test_of_overlapping_counts_the_later_line_holds() -> None:
    """As in a published log, whose lines are for some minutes ahead."""
    text = (
        "2021-12-10, 13:07:00, 80\n2021-12-10, 13:08:00, 80\n2021-12-10, 13:09:00, 80\n"
        "2021-12-10, 13:08:00, 70\n2021-12-10, 13:09:00, 70\n2021-12-10, 13:10:00, 70\n"
        "2021-12-10, 13:09:30, 70\n2021-12-10, 13:10:30, 70\n2021-12-10, 13:10:00, 60\n"
        "2021-12-10, 13:11:00, 60\n"
    )
    assert read(text) == ([(0, 80), (60, 70), (180, 60)], 240)


def test_a_log_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(EVENTS.encode("utf-8-sig"))
    save = tmp_path / "trace.json"
    code, told = run("trace", "import", str(tmp_path / "log"), "--pool", POOL, "--save", str(save))
    assert (code, save.exists()) == (0, True), told


def test_files_of_several_zones_are_merged() -> None:
    one = series_of(LogFile("a", SKYPILOT, "V100-16@a", 8))
    two = series_of(LogFile("b", COUNTS, "V100-16@b", 1))
    both = merged([one, two])
    assert both.end_s == 180
    assert [(at_s, dict(counts)) for at_s, counts in both.points] == [
        (0, {"V100-16@a": 0, "V100-16@b": 2}),
        (60, {"V100-16@a": 0, "V100-16@b": 3}),
        (120, {"V100-16@a": 0, "V100-16@b": 2}),
    ]


def test_names_of_nodes_are_kept_and_a_replaced_node_is_a_point() -> None:
    series = series_of(LogFile("log", EVENTS, POOL, 1))
    assert series.points[-1] == (180, {POOL: 2})
    assert [nodes[POOL] for nodes in series.nodes] == [
        ("a", "b"), ("a", "b", "c"), ("b", "c"), ("c", "d")
    ]  # fmt: skip
    assert merged([series]) == series
    document = trace_document(series, "log")
    assert document["points"][1]["available"] == [
        {"gpu_type": "V100-16", "zone": "us-east-1c", "gpus": 3, "nodes": ["a", "b", "c"]}
    ]
    assert series_of(LogFile("log", SEGMENT, POOL, 1)).nodes == (
        {POOL: ("n0", "n1")}, {POOL: ("n0",)}
    )  # fmt: skip
    plain = series.without_names()
    assert [at_s for at_s, _ in plain.points] == [0, 60, 120]
    assert "nodes" not in trace_document(plain, "log")["points"][1]["available"][0]
    assert "nodes" not in trace_document(series_of(LogFile("x", COUNTS, POOL, 1)), "")["points"][0]


@pytest.mark.parametrize(
    "raw",
    [
        COUNTS.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbftime_1,nodes\n" + COUNTS.encode(),
        b"# of the 3rd of May\n\n" + COUNTS.encode(),
    ],
)
def test_headings_and_other_line_ends_are_read(tmp_path: Path, raw: bytes) -> None:
    log, save = tmp_path / "log.csv", tmp_path / "trace.json"
    log.write_bytes(raw)
    words = ("--pool", POOL, "--unit", "ms", "--save", str(save))
    code, told = run("trace", "import", str(log), *words)
    assert code == 0, told
    assert "each node has 1 GPU (--gpus-per-node)" in told
    assert [point["time_s"] for point in json.loads(save.read_text())["points"]] == [0, 60, 120]
    code, told = run("trace", "import", str(log), *words, "--gpus-per-node", "8")
    assert "--gpus-per-node" not in told


@pytest.mark.parametrize(
    ("raw", "words", "told"),
    [
        (gzip.compress(b"0,1\n", mtime=0), (), "log: is compressed; unpack it with gunzip first"),
        (bytes(range(256)), (), "log: is not UTF-8 text; save it as UTF-8 text"),
        (COUNTS.encode("utf-16"), (), "log: is not UTF-8 text"),
        (None, (), "is a directory; name a file inside it"),
        (b"", (), "log: is empty"),
        (COUNTS.encode(), ("--pool", "V999@x"), '--pool: no GPU "V999" is known'),
        (COUNTS.encode(), ("--pool", "V100-16@x y"), "write it as GPU@ZONE"),
        (
            OWN.encode(),
            ("--pool", POOL),
            "--pool: is given 1 time; 0 of the files are not sailord's",
        ),
    ],
)
def test_mistakes_of_imports_have_one_error(
    tmp_path: Path, raw: bytes | None, words: tuple[str, ...], told: str
) -> None:
    log = tmp_path / "log"
    if raw is None:
        log.mkdir()
    else:
        log.write_bytes(raw)
    code, output = run("trace", "import", str(log), *words, "--save", str(tmp_path / "trace.json"))
    assert (code, output.count("error:")) == (2, 1)
    assert told in output


def test_files_that_are_given_twice_or_share_names_are_mistakes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_text(EVENTS)
    save = ("--unit", "ms", "--save", str(tmp_path / "trace.json"))
    pools = ("--pool", POOL, "--pool", POOL)
    code, told = run("trace", "import", str(one), str(one), *pools, *save)
    assert (code, "one: is given twice" in told) == (2, True)
    code, told = run("trace", "import", str(one), str(two), *pools, "--names", *save)
    assert (code, f'--names: finds several nodes "a" of {POOL}' in told) == (2, True)
    assert run("trace", "import", str(one), str(two), *pools, *save)[0] == 0


def test_each_file_that_is_not_sailords_needs_a_pool(tmp_path: Path) -> None:
    own, other, save = tmp_path / "own", tmp_path / "other", tmp_path / "trace.json"
    own.write_text(OWN)
    other.write_text(COUNTS)
    words = ("--unit", "ms", "--pool", "T4@x", "--save", str(save))
    code, told = run("trace", "import", str(own), str(other), *words)
    assert code == 0, told
    kinds = {
        up["gpu_type"] for p in json.loads(save.read_text())["points"] for up in p["available"]
    }
    assert kinds == {"T4", "V100-16", "A100-40"}


@pytest.mark.parametrize("text", ['{"at": 5.0, "gpus": {}}\n', "0,1\n"])
def test_a_log_of_one_moment_is_a_mistake(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    save = tmp_path / "trace.json"
    words = () if "at" in text else ("--pool", POOL)
    code, told = run("trace", "import", str(tmp_path / "log"), *words, "--save", str(save))
    assert (code, "log: covers no time" in told, save.exists()) == (2, True, False)


CLUSTER = """
[[pool]]
zone = "us-east1-b"
gpu = "V100-16"
gpus_per_machine = 8
gpus = 8
"""
JOB = """
[model]
preset = "opt-125m"
[training]
global_batch = 8
sequence = 128
precision = "fp32"
optimizer = "adam"
"""


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


def test_an_imported_trace_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "us-east1-b_v100_8.json"
    log.write_text(SKYPILOT)
    for name, text in (("cluster.toml", CLUSTER), ("job.toml", JOB)):
        (tmp_path / name).write_text(text)
    trace = str(tmp_path / "trace.json")
    code, told = run("trace", "import", str(log), "--save", trace)
    assert code == 0, told
    assert "20 min, 2 changes, at most 8 GPUs" in told
    assert "nodes that are available, and some are for 50% of the time" in told
    files = [str(tmp_path / name) for name in ("job.toml", "cluster.toml")]
    code, told = run("replay", trace, *files, "--budget", "3", "--json")
    assert code == 0, told
    assert json.loads(told)["duration_s"] == 1200


def test_a_spot_trace_is_replayed_where_there_are_both_contracts(tmp_path: Path) -> None:
    log = tmp_path / "us-east1-b_v100_8.json"
    log.write_text(SKYPILOT)
    for name, text in (("cluster.toml", CLUSTER + CLUSTER + "spot = true\n"), ("job.toml", JOB)):
        (tmp_path / name).write_text(text)
    trace = str(tmp_path / "trace.json")
    replay = ("replay", trace, str(tmp_path / "job.toml"), str(tmp_path / "cluster.toml"))
    assert run("trace", "import", str(log), "--save", trace)[0] == 0
    code, told = run(*replay, "--budget", "3")
    assert (code, "`trace import --spot`" in told) == (2, True)
    assert run("trace", "import", str(log), "--spot", "--save", trace)[0] == 0
    code, told = run(*replay, "--budget", "3", "--json")
    assert code == 0, told


def test_a_log_of_sailord_about_both_contracts_of_a_place_is_replayed(tmp_path: Path) -> None:
    log, trace = tmp_path / "availability.jsonl", str(tmp_path / "trace.json")
    pools = {"V100-16@us-east1-b": 8, "V100-16@us-east1-b spot": 8}
    log.write_text("".join(json.dumps({"at": at, "gpus": pools}) + "\n" for at in (0, 900)))
    for name, text in (("cluster.toml", CLUSTER + CLUSTER + "spot = true\n"), ("job.toml", JOB)):
        (tmp_path / name).write_text(text)
    assert run("trace", "import", str(log), "--save", trace)[0] == 0
    files = [str(tmp_path / name) for name in ("job.toml", "cluster.toml")]
    code, told = run("replay", trace, *files, "--budget", "3", "--json")
    assert code == 0, told
    (up,) = [each["available"] for each in json.loads(Path(trace).read_text())["points"]]
    assert [(each["gpus"], each["spot"]) for each in up] == [(8, False), (8, True)]


def test_a_file_that_names_no_pool_needs_one(tmp_path: Path) -> None:
    log = tmp_path / "trace.csv"
    log.write_text(EVENTS)
    save = ("--save", str(tmp_path / "out.json"))
    code, told = run("trace", "import", str(log), *save)
    assert (code, "give --pool GPU@ZONE" in told) == (2, True)
    code, told = run("trace", "import", str(log), "--pool", "V100-16@x", "--pool", "T4@y", *save)
    assert (code, "once for each of these" in told) == (2, True)
    code, told = run("trace", "import", str(log), "--pool", "V100-16", *save)
    assert (code, "write it as GPU@ZONE" in told) == (2, True)
    code, told = run("trace", "import", str(log), "--pool", "v100-16@x", "--names", *save)
    assert code == 0, told
    entry = json.loads((tmp_path / "out.json").read_text())["points"][0]["available"]
    assert entry == [{"gpu_type": "V100-16", "zone": "x", "gpus": 2, "nodes": ["a", "b"]}]
    code, told = run("trace", "import", str(log), "--pool", "v100-16@x", *save)
    assert code == 0, told
    assert "nodes" not in (tmp_path / "out.json").read_text()
