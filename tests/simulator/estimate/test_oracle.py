"""The oracle against diagrams and sums by hand.

In the diagrams one character is one second: 0, 1, 2 are the forward passes of these micro batches,
a, b, c their backward passes, and a dot is a device without a pass.
"""

from __future__ import annotations

import pytest

from tests.simulator.oracle import (
    Compute,
    Edge,
    Group,
    Program,
    Receive,
    Result,
    Schedule,
    Send,
    SyncJob,
    gpipe_order,
    interleaved_order,
    lockstep_program,
    one_forward_one_backward_order,
    run_programs,
    simulate_pipeline,
    simulate_sync,
)


def _chain(
    stages: int,
    *,
    forward_s: float,
    backward_s: float,
    activation_s: float = 0.0,
    gradient_s: float = 0.0,
) -> tuple[list[Group], list[Edge]]:
    groups = [Group(f"s{k}", k, forward_s, backward_s) for k in range(stages)]
    edges = [Edge(f"s{k}", f"s{k + 1}", activation_s, gradient_s) for k in range(stages - 1)]
    return groups, edges


def _drawn(result: Result, group: str) -> str:
    """A group's row of the diagram, as it is drawn in the tests."""
    row = ["."] * round(max(result.end_s.values()))
    for (name, kind, m), start_s in result.start_s.items():
        if name == group:
            for second in range(round(start_s), round(result.end_s[name, kind, m])):
                row[second] = str(m) if kind == "F" else "abcdef"[m]
    return "".join(row)


# Orders ---------------------------------------------------------------------------------------


def test_one_forward_one_backward_order_of_three_stages() -> None:
    orders = [
        " ".join(f"{kind}{m}" for kind, m in one_forward_one_backward_order(stage, 3, 4))
        for stage in range(3)
    ]
    assert orders == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_warm_up_stops_at_the_last_micro_batch() -> None:
    assert one_forward_one_backward_order(0, 5, 2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]


def test_gpipe_order_starts_both_directions_at_the_first_micro_batch() -> None:
    assert gpipe_order(2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]


def test_interleaved_order_of_two_devices_with_two_chunks() -> None:
    """Device 0 warms up with (2-0-1)*2 + (2-1)*2 = 4 of 8 units, device 1 with 2."""
    orders = [
        " ".join(f"{kind}{m}@{stage}" for kind, stage, m in interleaved_order(device, 2, 4, 4))
        for device in range(2)
    ]
    assert orders == [
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0",
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1",
    ]


def test_interleaved_order_is_all_warm_up_with_one_round_of_micro_batches() -> None:
    order = " ".join(f"{kind}{m}@{stage}" for kind, stage, m in interleaved_order(1, 2, 4, 2))
    assert order == "F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1"


# Diagrams: two stages and three micro batches, forward 2 s and backward 3 s ------------------


def test_1f1b_without_transfer_time() -> None:
    groups, edges = _chain(2, forward_s=2, backward_s=3)
    result = simulate_pipeline(groups, edges, micro_batches=3, schedule="1f1b")
    assert _drawn(result, "s0") == "0011...aaa22bbb..ccc"
    assert _drawn(result, "s1") == "..00aaa11bbb22ccc..."
    assert result.makespan_s == 20
    assert result.compute_s == [15, 15]
    assert result.last_backward_s == {"s0": (17, 20), "s1": (14, 17)}


def test_1f1b_buffered() -> None:
    """Activations take 1 s and gradients 2 s, and sends do not block."""
    groups, edges = _chain(2, forward_s=2, backward_s=3, activation_s=1, gradient_s=2)
    result = simulate_pipeline(groups, edges, micro_batches=3, schedule="1f1b")
    assert _drawn(result, "s0") == "0011......aaa22bbb.....ccc"
    assert _drawn(result, "s1") == "...00aaa11bbb...22ccc....."
    assert result.busy_s == result.compute_s == [15, 15]
    assert result.free_s == [26, 21]


def test_1f1b_blocking() -> None:
    """The same, but a forward holds stage 0 for 1 s more, a backward stage 1 for 2 s more."""
    groups, edges = _chain(2, forward_s=2, backward_s=3, activation_s=1, gradient_s=2)
    result = simulate_pipeline(groups, edges, micro_batches=3, schedule="1f1b", sending="blocking")
    assert _drawn(result, "s0") == "00.11.....aaa22..bbb....ccc"
    assert _drawn(result, "s1") == "...00aaa..11bbb..22ccc....."
    assert result.compute_s == [15, 15]
    assert result.busy_s == [15 + 3 * 1, 15 + 3 * 2]
    assert result.free_s == [27, 24]  # Stage 1 is held until its last gradient is over.
    assert result.last_backward_s == {"s0": (24, 27), "s1": (19, 22)}


def test_1f1b_lockstep() -> None:
    """Activation 1 waits behind gradient 0 (at 10 s), activation 2 behind gradient 1 (18 s)."""
    groups, edges = _chain(2, forward_s=2, backward_s=3, activation_s=1, gradient_s=2)
    result = simulate_pipeline(groups, edges, micro_batches=3, schedule="1f1b", sending="lockstep")
    assert _drawn(result, "s0") == "0011......aaa22...bbb.....ccc"
    assert _drawn(result, "s1") == "...00aaa...11bbb...22ccc....."
    assert [result.arrival_s[0, "F", m] for m in range(3)] == [3, 11, 19]
    assert [result.arrival_s[0, "B", m] for m in range(3)] == [10, 18, 26]


def test_lockstep_instructions_cost_time() -> None:
    """Each of three sends and three receives takes 1 s of either device.

    Stage 0 sends activation 0 from 2 to 3 s; it comes at 4; stage 1 takes it in until 5, and so on.
    """
    groups, edges = _chain(2, forward_s=2, backward_s=3, activation_s=1, gradient_s=2)
    result = simulate_pipeline(
        groups, edges, micro_batches=3, schedule="1f1b", sending="lockstep", instruction_s=1
    )
    assert _drawn(result, "s0") == "00.11..........aaa22.......bbb........ccc"
    assert _drawn(result, "s1") == ".....00aaa.......11bbb.......22ccc......."
    assert result.free_s == [41, 35]
    assert result.busy_s == [21, 21]
    assert result.compute_s == [15, 15]


def test_receiving_costs_time_even_if_the_message_has_arrived() -> None:
    """Gradient 0 comes at 10 s, stage 0 is free at 11 s and begins backward 0 at 13 s."""
    groups, edges = [Group("s0", 0, 5, 1), Group("s1", 1, 1, 1)], [Edge("s0", "s1")]
    result = simulate_pipeline(
        groups, edges, micro_batches=2, schedule="1f1b", sending="lockstep", instruction_s=1
    )
    assert _drawn(result, "s0") == "00000.11111..a....b"
    assert _drawn(result, "s1") == ".......0a.....1b..."


def test_gpipe_transfers_queue_in_their_channel() -> None:
    """Forwards of 1 s make activations faster than 2 s a transfer can carry: 3, 5, 7 s."""
    groups, edges = _chain(2, forward_s=1, backward_s=1, activation_s=2, gradient_s=1)
    result = simulate_pipeline(groups, edges, micro_batches=3, schedule="gpipe")
    assert _drawn(result, "s0") == "012.......abc"
    assert _drawn(result, "s1") == "...0.1.2abc.."


# Lockstep's instructions ------------------------------------------------------------------------


def test_lockstep_instructions_of_two_stages() -> None:
    groups, edges = _chain(2, forward_s=1, backward_s=1)
    assert lockstep_program(groups[0], edges, 2, 3) == [
        Compute("s0", "F", 0),
        Send(0, "F", 0),
        Compute("s0", "F", 1),
        Receive(0, "B", 0),
        Send(0, "F", 1),
        Compute("s0", "B", 0),
        Compute("s0", "F", 2),
        Receive(0, "B", 1),
        Send(0, "F", 2),
        Compute("s0", "B", 1),
        Receive(0, "B", 2),
        Compute("s0", "B", 2),
    ]
    assert lockstep_program(groups[1], edges, 2, 3) == [
        Receive(0, "F", 0),
        Compute("s1", "F", 0),
        Compute("s1", "B", 0),
        Send(0, "B", 0),
        Receive(0, "F", 1),
        Compute("s1", "F", 1),
        Compute("s1", "B", 1),
        Send(0, "B", 1),
        Receive(0, "F", 2),
        Compute("s1", "F", 2),
        Compute("s1", "B", 2),
        Send(0, "B", 2),
    ]


def test_lockstep_sends_before_it_waits_when_a_pass_is_followed_by_an_idle_slot() -> None:
    """With fewer micro batches than stages left, activation 0 must not wait for gradient 0."""
    groups, edges = _chain(3, forward_s=1, backward_s=1)
    assert lockstep_program(groups[1], edges, 3, 1) == [
        Receive(0, "F", 0),
        Compute("s1", "F", 0),
        Send(1, "F", 0),
        Receive(1, "B", 0),
        Compute("s1", "B", 0),
        Send(0, "B", 0),
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 9])
def test_lockstep_runs_passes_in_1f1b_order_without_deadlock(
    stages: int, micro_batches: int
) -> None:
    groups, edges = _chain(stages, forward_s=1, backward_s=2, activation_s=1, gradient_s=1)
    for group in groups:
        program = lockstep_program(group, edges, stages, micro_batches)
        passes = [(i.kind, i.micro_batch) for i in program if isinstance(i, Compute)]
        assert passes == one_forward_one_backward_order(group.stage, stages, micro_batches)
    lockstep = simulate_pipeline(
        groups, edges, micro_batches=micro_batches, schedule="1f1b", sending="lockstep"
    )
    buffered = simulate_pipeline(groups, edges, micro_batches=micro_batches, schedule="1f1b")
    assert len(lockstep.end_s) == 2 * stages * micro_batches
    assert lockstep.makespan_s >= buffered.makespan_s


def test_deadlock_names_the_stuck_passes() -> None:
    """Stage 0 keeps back its only activation until it has the gradient that needs it."""
    groups, edges = _chain(2, forward_s=1, backward_s=1)
    first: Program = [
        Compute("s0", "F", 0),
        Receive(0, "B", 0),
        Send(0, "F", 0),
        Compute("s0", "B", 0),
    ]
    second = lockstep_program(groups[1], edges, 2, 1)
    with pytest.raises(AssertionError) as caught:
        run_programs([first, second], groups, edges)
    assert "device 0: Receive(edge=0, kind='B', micro_batch=0)" in str(caught.value)
    assert "device 1: Receive(edge=0, kind='F', micro_batch=0)" in str(caught.value)


def test_backward_before_its_forward_deadlocks() -> None:
    groups, edges = _chain(1, forward_s=1, backward_s=1)
    with pytest.raises(AssertionError, match=r"device 0: Compute.*kind='B'"):
        run_programs([[Compute("s0", "B", 0), Compute("s0", "F", 0)]], groups, edges)


# Known formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_equal_stages_without_transfer_take_m_plus_s_minus_one_rounds(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    groups, edges = _chain(stages, forward_s=2, backward_s=5)
    result = simulate_pipeline(groups, edges, micro_batches=micro_batches, schedule=schedule)
    assert result.makespan_s == (micro_batches + stages - 1) * (2 + 5)
    assert result.compute_s == [micro_batches * (2 + 5)] * stages


@pytest.mark.parametrize(
    ("devices", "chunks", "rounds"),
    [(1, 3, 2), (2, 1, 2), (2, 2, 1), (2, 2, 3), (3, 2, 2), (4, 2, 1), (4, 3, 4)],
)
def test_interleaving_divides_the_bubble_by_the_chunks(
    devices: int, chunks: int, rounds: int
) -> None:
    """A chunk takes 7 s, a whole device's share v times that, its bubble (D-1)/v of the share."""
    groups, edges = _chain(devices * chunks, forward_s=2, backward_s=5)
    micro_batches = devices * rounds
    result = simulate_pipeline(
        groups, edges, micro_batches=micro_batches, schedule="interleaved", devices=devices
    )
    share_s = 7 * chunks
    assert result.compute_s == [micro_batches * share_s] * devices
    assert result.makespan_s - micro_batches * share_s == (devices - 1) * share_s / chunks


def test_interleaved_transfers_at_the_chunk_boundary() -> None:
    """Two devices, two chunks, two micro batches; from device 1 back to 0 it is slow.

    Activations of 1 s, but 3 s from stage 1 to 2; gradients of 0 s, but 2 s from stage 2 to 1:

        device 0:  0 1 . . . . 0 . . 1 . . . a b . . a . b     (stages 0 and 2)
        device 1:  . . 0 1 . . . . 0 . . 1 a b . . a . b .     (stages 1 and 3)
    """
    groups = [Group(f"s{k}", k, 1, 1) for k in range(4)]
    edges = [Edge("s0", "s1", 1, 0), Edge("s1", "s2", 3, 2), Edge("s2", "s3", 1, 0)]
    result = simulate_pipeline(groups, edges, micro_batches=2, schedule="interleaved", devices=2)
    assert _drawn(result, "s0") == "01...............a.b"
    assert _drawn(result, "s2") == "......0..1...ab....."
    assert _drawn(result, "s1") == "..01............a.b."
    assert _drawn(result, "s3") == "........0..1ab......"
    assert result.free_s == [20, 19]
    assert result.compute_s == [8, 8]


# Split stages -------------------------------------------------------------------------------------


def _forked() -> tuple[list[Group], list[Edge]]:
    """One group feeds a quick and a slow one."""
    groups = [Group("first", 0, 2, 2), Group("quick", 1, 1, 1), Group("slow", 1, 3, 2)]
    return groups, [Edge("first", "quick", 1, 1), Edge("first", "slow", 2, 1)]


def test_a_backward_needs_the_gradients_of_all_shares() -> None:
    groups, edges = _forked()
    result = simulate_pipeline(groups, edges, micro_batches=1, schedule="1f1b")
    assert _drawn(result, "first") == "00........aa"
    assert _drawn(result, "quick") == "...0a......."
    assert _drawn(result, "slow") == "....000aa..."


def test_blocking_sends_to_one_share_after_the_other() -> None:
    """The transfers of 1 s and 2 s begin at 2 s and 3 s, and the device is held until 5 s."""
    groups, edges = _forked()
    result = simulate_pipeline(groups, edges, micro_batches=1, schedule="1f1b", sending="blocking")
    assert _drawn(result, "first") == "00.........aa"
    assert _drawn(result, "quick") == "...0a........"
    assert _drawn(result, "slow") == ".....000aa..."
    assert result.busy_s == [4 + 3, 2 + 1, 5 + 1]


def test_a_forward_needs_the_activations_of_all_shares() -> None:
    groups = [Group("quick", 0, 1, 1), Group("slow", 0, 4, 1), Group("last", 1, 2, 2)]
    edges = [Edge("quick", "last", 1, 3), Edge("slow", "last", 2, 1)]
    result = simulate_pipeline(groups, edges, micro_batches=1, schedule="gpipe")
    assert _drawn(result, "quick") == "0............a"
    assert _drawn(result, "slow") == "0000.......a.."
    assert _drawn(result, "last") == "......00aa...."


def test_group_without_edges_is_rejected() -> None:
    groups, edges = _forked()
    with pytest.raises(AssertionError, match="no edge leads to slow"):
        simulate_pipeline(groups, edges[:1], micro_batches=1, schedule="1f1b")
    with pytest.raises(AssertionError, match="no edge leaves first"):
        simulate_pipeline(groups, [], micro_batches=1, schedule="1f1b")


# Gradient synchronisation -------------------------------------------------------------------------

BACKWARD_END_S = {"a": 10.0, "b": 12.0, "c": 20.0, "alone": 3.0}
OPTIMIZER_S = {"a": 1.0, "b": 2.0, "c": 5.0, "alone": 4.0}
JOBS = [
    SyncJob(2, ready_s={"a": 6, "b": 7}),
    SyncJob(3, ready_s={"b": 8, "c": 13}),
    SyncJob(1, ready_s={"a": 10, "b": 12}),
]


def test_serial_sync_starts_after_the_last_backward_of_all_holders() -> None:
    """b is held up by c, and a by b.

    a and b 12-14; b and c not before c has ended, 20-23; a and b not before b is free, 23-24.
    """
    result = simulate_sync(BACKWARD_END_S, JOBS, optimizer_s=OPTIMIZER_S, mode="serial")
    assert result.job_end_s == [14, 23, 24]
    assert result.holder_end_s == {"a": 24, "b": 24, "c": 23}
    assert result.step_end_s == {"a": 25, "b": 26, "c": 28, "alone": 7}
    assert result.iteration_s == 28


def test_overlapped_sync_starts_when_gradients_are_ready() -> None:
    """a and b 7-9; b and c 13-16; a and b 16-17; c's step waits for its backward at 20."""
    result = simulate_sync(BACKWARD_END_S, JOBS, optimizer_s=OPTIMIZER_S, mode="overlap")
    assert result.job_end_s == [9, 16, 17]
    assert result.holder_end_s == {"a": 17, "b": 17, "c": 16}
    assert result.step_end_s == {"a": 18, "b": 19, "c": 25, "alone": 7}
    assert result.iteration_s == 25
