"""The local launcher: messages and exits of forked ranks, and no process left behind; no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.daemon.process_cleanup import children_of
from simulator.documents.problems import InputError, Problem
from worker.cli.local_launcher import PeerFailedError, RanksFailedError, RunFailedError, run_ranks
from worker.profiling.activity_board import ActivityBoard

ROOT = Path(__file__).resolve().parents[3]
FOREVER_S = 600.0


def run(body, ranks=3):
    """Run ranks and return their messages."""
    heard = []
    board = ActivityBoard(ranks)
    run_ranks(
        lambda rank, say: body(rank, say, board),
        ranks=ranks,
        board=board,
        on_message=lambda *message: heard.append(message),
    )
    return heard


@pytest.fixture(autouse=True)
def _leaves_nothing():
    before, files = set(children_of(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield
    assert set(children_of(os.getpid())) == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_messages_of_a_rank_arrive_in_order():
    def body(_rank, say, _board):
        for turn in range(3):
            say({"kind": "hello", "turn": turn, "filling": "x" * 100_000})

    heard = run(body)
    for rank in range(3):
        assert [message["turn"] for number, message in heard if number == rank] == [0, 1, 2]


def test_killed_rank_is_named_with_its_activity():
    def body(rank, _say, board):
        board.write(rank, 5, "backward")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        raise PeerFailedError("rank 1 is lost")

    with pytest.raises(
        RanksFailedError, match=r"rank 1 was killed by SIGKILL in backward of step 5"
    ) as e:
        run(body)
    assert "; ranks 0, 2 noticed within 0." in str(e.value)


def test_rank_that_does_not_report_is_not_waited_for():
    def body(rank, _say, _board):
        if rank == 0:
            os._exit(3)
        time.sleep(FOREVER_S)

    # Waiting for the others would take longer than a test may.
    with pytest.raises(RanksFailedError, match=r"rank 0 ended with code 3 in the start of step 0$"):
        run(body)


def test_cause_is_reported_even_if_its_victims_report_first():
    def body(rank, _say, _board):
        if rank == 2:
            time.sleep(0.2)
            raise ValueError("too small")
        raise PeerFailedError("rank 2 is gone")

    with pytest.raises(RanksFailedError, match="ValueError: too small"):
        run(body)


def test_complete_message_is_repeated_unchanged():
    def body(_rank, _say, _board):
        raise RunFailedError("step 3: the loss is no number")

    with pytest.raises(RanksFailedError, match=r"^step 3: the loss is no number$"):
        run(body)


def test_input_error_of_a_rank_arrives_with_all_problems():
    def body(rank, _say, _board):
        if rank == 1:
            raise InputError([Problem("a.bin", "is short", "make it longer")])
        raise PeerFailedError("rank 1 has left")

    with pytest.raises(InputError, match="is short; make it longer"):
        run(body)


def test_exception_in_the_message_handler_ends_all_ranks():
    def body(_rank, say):
        say({"kind": "hello"})
        time.sleep(FOREVER_S)

    def hear(_rank, _message):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_ranks(body, ranks=2, board=ActivityBoard(2), on_message=hear)


# A separate parent, whose ranks report their pids and then wait.
PARENT = """
import json, os, sys, time
from worker.cli.local_launcher import run_ranks
from worker.profiling.activity_board import ActivityBoard

def body(rank, say):
    say({"kind": "pid", "pid": os.getpid(), "group": os.getpgid(0)})
    time.sleep(600)

def hear(rank, message):
    print(json.dumps(message), flush=True)

try:
    run_ranks(body, ranks=2, board=ActivityBoard(2), on_message=hear)
except BaseException as error:
    print(json.dumps({"ended": type(error).__name__}), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_rank_outlives_its_parent(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    ranks = [json.loads(parent.stdout.readline()) for _ in range(2)]
    lives = [os.pidfd_open(rank["pid"]) for rank in ranks]
    assert {rank["group"] for rank in ranks} == {rank["pid"] for rank in ranks}
    parent.send_signal(number)
    rest, _ = parent.communicate(timeout=30)
    if number == signal.SIGKILL:
        assert rest == b""
    else:
        assert json.loads(rest) == {"ended": "Interrupted"}
    for life in lives:
        wait_for_death(life)


def test_ignored_sighup_stays_ignored():
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    body = ignore + PARENT.replace("time.sleep(600)", "sys.stdin.readline()")
    parent = subprocess.Popen(
        [sys.executable, "-c", body], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for _ in range(2):
        assert parent.stdout.readline()
    parent.send_signal(signal.SIGHUP)
    rest, _ = parent.communicate(b"", timeout=30)
    assert (rest, parent.returncode) == (b"", 0)


# The interrupt comes while torch is imported, which may turn it into any exception.
LOADING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from worker.cli.main import main
main(["run", "--job", "none.toml"])
"""


def test_an_interrupt_while_torch_is_loaded_ends_at_once():
    command = [sys.executable, "-c", LOADING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def wait_for_death(life: int) -> None:
    """Wait for the exit of a process that is not our child."""
    try:
        assert select.select([life], [], [], 10.0)[0], "a rank outlived its parent"
    finally:
        os.close(life)
