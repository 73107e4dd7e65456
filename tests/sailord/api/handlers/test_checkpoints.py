"""A list of checkpoints whose storage cannot be read is no list without checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.records import Durable, Saving
from sailord.api.handlers.checkpoints import given_up_text, list_checkpoints
from sailord.api.handlers.context import CONTEXT
from sailord.checkpoints.catalog import Checkpoints
from sailord.core.model.state import State
from tests.sailord.core.states import JOB, durable, job, state


def storing_at(uri: str, newest: Durable | None = None) -> State:
    """A running job with its checkpoints there."""
    known = state(job=job(saving=Saving(uri)))
    return known if newest is None else replace(known, durables={JOB: newest})


def asked(known: State) -> Any:
    """A request about the job, as far as the handler reads one."""
    cluster = SimpleNamespace(
        led_of=lambda _: known,
        last_led=known,
        checkpoints=Checkpoints(("*",)),
        outbox=SimpleNamespace(at_of={}),
    )
    return SimpleNamespace(
        app={CONTEXT: SimpleNamespace(cluster=cluster)}, match_info={"job": str(JOB)}
    )


@pytest.mark.parametrize(
    ("newest", "known"),
    [(durable(20), "step 20 is durable"), (None, "no step is durable")],
)
async def test_unreadable_storage_is_an_error_and_no_empty_list(
    tmp_path: Path, newest: Durable | None, known: str
) -> None:
    (tmp_path / "kept").write_bytes(b"in place of the folder")
    uri = f"file://{tmp_path}/kept"
    answer = await list_checkpoints(asked(storing_at(uri, newest)))
    assert answer.status == 502
    assert answer.text is not None
    (said,) = json.loads(answer.text)["problems"]
    assert said["place"] == f"the checkpoints of {JOB}"
    assert said["what"].startswith(f"cannot be read now: {uri}/{JOB} cannot be listed: Not a dir")
    assert known in said["what"]
    assert said["cure"].startswith("mend the storage")


async def test_an_empty_list_of_checkpoints_names_the_last_durable_step(tmp_path: Path) -> None:
    answer = await list_checkpoints(asked(storing_at(f"file://{tmp_path}/kept", durable(20))))
    assert answer.text is not None
    found = json.loads(answer.text)
    assert (answer.status, found["checkpoints"], found["durable_step"]) == (200, [], 20)


def test_a_rollback_tells_the_steps_and_checkpoints_that_it_gives_up() -> None:
    """Those that an earlier rollback gave up do not count: 15 and 18 are of another past."""
    lines: dict[int, Durable | None] = {
        10: None, 15: durable(10), 18: durable(15), 20: durable(10), 30: durable(20),
    }  # fmt: skip
    known: Any = [SimpleNamespace(point=durable(n).point, parent=p) for n, p in lines.items()]
    said = given_up_text(44, durable(10), durable(30), known)
    assert said == (
        "it goes back from step 44 to step 10, 34 steps lost; "
        "the checkpoints of steps 20, 30 will be discarded"
    )
    assert given_up_text(44, durable(20), durable(30), known).endswith(
        "of step 30 will be discarded"
    )
    assert given_up_text(31, durable(30), durable(30), known) == (
        "it goes back from step 31 to step 30, 1 step lost"
    )
