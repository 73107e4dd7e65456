"""Keys of the screen: what they change, and which orders they complete."""

from __future__ import annotations

from sailord.screen.terminal import keys_of
from sailord.screen.ui import Asked, Ui, after_key

NODES = ["a1", "a10", "a2", "b1"]


FIRST = Ui(can_kill=True)


def pressed(*keys: str, ui: Ui = FIRST, back_max: int = 100) -> tuple[Ui, list[Asked]]:
    given = []
    for key in keys:
        ui, asked = after_key(ui, key, NODES, back_max)
        given += [asked] if asked is not None else []
    return ui, given


def test_bytes_of_a_terminal_become_keys():
    assert keys_of("q\x1b[A\x1b[6~x\r\x7f\x1b") == [
        *("q", "up", "pagedown", "x", "enter", "backspace", "escape")
    ]


def test_an_order_needs_a_verb_a_node_and_enter():
    ui, given = pressed("p", "a", "2", "enter")
    assert given == [Asked("preempt", "a2")]
    assert ui == Ui(can_kill=True)


def test_the_beginning_of_a_name_is_enough_if_one_begins_so():
    assert pressed("k", "b", "enter")[1] == [Asked("kill", "b1")]
    assert pressed("k", "a", "enter")[1] == []
    assert pressed("d", "a", "1", "enter")[1] == [Asked("drain", "a1")]


def test_a_name_whose_node_is_gone_does_not_reach_another():
    """The list of nodes is read anew while one types."""
    typed = Ui(verb="drain", typed="a1")
    assert after_key(typed, "enter", ["a10", "b1"], 0) == (typed, None)
    assert after_key(typed, "enter", ["a1", "a10"], 0)[1] == Asked("drain", "a1")


def test_escape_gives_no_order():
    assert pressed("k", "b", "escape", "enter") == (Ui(can_kill=True), [])


def test_letters_of_a_typed_name_are_not_commands():
    ui, given = pressed("p", "q", "backspace", "a", "2", "tab", "enter")
    assert given == [Asked("preempt", "a2")]
    assert ui.verb is None


def test_nodes_are_killed_only_where_they_are_processes():
    assert pressed("k", "b", "enter", ui=Ui())[1] == []


def test_scrolling_stops_at_the_newest_event():
    assert pressed("up", "up", "down", "down", "down")[0].back == 0
    assert pressed("pageup", "up")[0].back == 11
    assert pressed("pageup", "end")[0].back == 0


def test_scrolling_stops_at_the_first_event():
    assert pressed(*["pageup"] * 20, "down", back_max=12)[0].back == 11
    assert pressed("up", back_max=0)[0].back == 0
    # More events were in sight before the terminal became higher.
    assert pressed("down", ui=Ui(back=40), back_max=12)[0].back == 11


def test_q_and_ctrl_c_quit():
    assert pressed("q")[1] == pressed("interrupt")[1] == [Asked("quit")]
    assert pressed("p", "interrupt")[1] == [Asked("quit")]


def test_tab_shows_the_next_job_unless_a_name_is_typed():
    assert pressed("tab")[1] == [Asked("next_job")]
    assert pressed("d", "tab")[1] == []
