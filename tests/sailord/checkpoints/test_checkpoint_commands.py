"""What sailorctl does with the checkpoints of a running job."""

from __future__ import annotations

import json

import pytest

from tests.processes import wait_until
from tests.sailord.checkpoints.made import JOB, SPEC, chain
from tests.sailord.daemon.test_cluster_commands import call


@pytest.mark.slow
def test_checkpoints_are_listed_pinned_and_rolled_back_to(place):
    kept = place.folder / "kept"
    chain(kept, 10, 20)
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    place.start_agent("a")
    file = place.folder / "job.toml"
    file.write_text(f'{SPEC}\n[checkpoint]\nuri = "file://{kept}"\n')
    anew = call(place, "submit", str(file), "--id", JOB)
    assert "already has checkpoints of a job j; use --resume newest" in anew.output
    unknown = call(place, "submit", str(file), "--id", JOB, "--resume", "15")
    assert "existing steps: 10, 20" in unknown.output
    changed = place.folder / "changed.toml"
    changed.write_text(file.read_text().replace("hidden = 16", "hidden = 32"))
    other = call(place, "submit", str(changed), "--id", JOB, "--resume", "20")
    assert "the model was changed since step 20" in other.output
    assert call(place, "submit", str(file), "--id", JOB, "--resume", "newest").exit_code == 0
    again = call(place, "submit", str(file), "--id", JOB, "--resume", "newest")
    assert "job j: exists already; use another id; `sailorctl checkpoint export j" in again.output
    wait_until(lambda: "running" in call(place, "status").output)
    assert _generation(place, 2)["generation"]["restore"]["point"]["step"] == 20

    listed = call(place, "checkpoint", "ls", JOB)
    assert "  20           1" in listed.output, listed.output
    assert f"at file://{kept}/j" in listed.output
    assert "newest" in listed.output
    assert call(place, "checkpoint", "pin", JOB, "10").output == "step 10 of j is pinned\n"
    assert (kept / "j" / "1-10" / "pin").exists()
    assert "pinned" in call(place, "checkpoint", "ls", JOB).output
    assert call(place, "checkpoint", "unpin", JOB, "10").exit_code == 0
    assert not (kept / "j" / "1-10" / "pin").exists()
    for was in ("pinned", "unpinned"):  # Lines of the history are stored soon after.
        text = f"the checkpoint of step 10 was {was}"
        wait_until(lambda said=text: said in call(place, "history", JOB).output)
    broken = kept / "j" / "1-15"
    broken.mkdir()
    (broken / "pin").write_bytes(b"")  # So retention keeps it.
    (broken / "manifest-3.json").write_bytes(b"{")
    shown = call(place, "checkpoint", "ls", JOB).output
    assert "unreadable: " in shown, shown
    assert "is truncated or damaged" in shown
    told = json.loads(call(place, "checkpoint", "ls", JOB, "--json").output)
    assert [each["step"] for each in told["unreadable"]] == [15]
    assert [each["step"] for each in told["checkpoints"]] == [10, 20]
    why = call(place, "checkpoint", "pin", JOB, "15")
    assert "the checkpoint of step 15 is unreadable" in why.output
    missing = call(place, "checkpoint", "pin", JOB, "11")
    assert missing.exit_code == 1
    assert "existing steps: 10, 20" in missing.output

    wait_until(lambda: place.status()["job"]["step"] > 22)
    back = call(place, "checkpoint", "rollback", JOB, "10", "--reason", "the loss went up")
    assert "rollback of j to step 10" in back.output
    job = wait_until(lambda: _generation(place, 3))
    assert job["generation"]["restore"]["source"] == "durable"
    assert job["generation"]["restore"]["point"] == {"step": 10, "generation": 1}
    assert job["durable"]["point"]["step"] == 10
    kinds = json.loads(call(place, "checkpoint", "ls", JOB, "--json").output)["checkpoints"]
    roles = {(each["step"], each["generation"]): each["role"] for each in kinds}
    assert (roles[20, 1], roles[10, 1]) == ("discarded", "newest")

    wait_until(lambda: json.loads(call(place, "moves", JOB, "--json").output)["moves"])
    moves = json.loads(call(place, "moves", JOB, "--json").output)["moves"]
    assert {"detect", "plan", "quiesce"} <= {name for name, _ in moves[-1]["phases"]}
    assert "s in all" in call(place, "moves", JOB).output


def _generation(place, number):
    job = place.ask("GET", f"/v1/jobs/{JOB}")[1]
    return job if job["generation"]["number"] == number else None


@pytest.mark.slow
def test_invalid_uri_of_a_submitted_job_is_refused(place):
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    file = place.folder / "job.toml"
    file.write_text(f'{SPEC}\n[checkpoint]\nuri = "az://bucket/x"\n')
    refused = call(place, "submit", str(file), "--id", JOB)
    assert refused.exit_code == 2
    assert "needs adlfs" in refused.output
