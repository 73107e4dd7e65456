"""Kills nodes under a script's job, and compares it with an undisturbed run.

``python -m tests.chaos.script_kills --kills 20 --seed 1 [--exact] SCRIPT -- ARGUMENTS`` trains the
script on a local cluster of four nodes. At random moments a random node that trains is killed, and
another one comes, at once or later, so that plans change in both directions. All losses and sample
hashes are compared with those of ``python -m worker run``. The result is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.tour.step_log import LoggedStep, StepLog
from tests.processes import SAILORCTL, wait_for

ROOT = Path(__file__).resolve().parents[2]
MACHINES = (*(("large", "zone-a"),) * 2, ("large", "zone-b"), ("small", "zone-c"))
TOLERANCE = 1e-6
"""Larger relative differences of a loss are errors, if it was computed in fp64."""
WITHIN_S = 240.0
"""Seconds for the next event; the machine may be busy."""
UNHANDLED = "Unhandled exception"
"""In the log of an agent or of sailord: a request ended by an error in our code."""


def main() -> int:
    """Run what the command line asks for; fail if a loss, a sample or a log is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.script_kills")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="compute in fp64")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        work = folder / "work"
        shutil.copytree(asked.script.parent, work)
        words = [asked.script.name, *asked.arguments]
        if asked.exact:
            shutil.copy(Path(__file__).with_name("exact_script.py"), work)
            words.insert(0, "exact_script.py")
        script, *arguments = words
        alone = undisturbed(work, script, arguments)
        try:
            found = kill_nodes(folder / "c", work, script, arguments, asked.kills, asked.seed)
        finally:
            kill_all(folder / "c")
            LocalFolders(folder / "c", port=0).remove()
    steps = found.pop("steps")
    if not steps:
        print(json.dumps(found))
        sys.exit(f"no step was trained; the job is {found['state']}: {found['reason']}")
    found |= compared(steps, alone)
    print(json.dumps(found))
    is_over = found["state"] == "done" and found["kills"] == asked.kills
    is_right = not (found["steps_missing"] or found["wrong_samples"] or found["unhandled"])
    if asked.exact:
        is_right = is_right and found["first_wrong"] is None
    return 0 if is_over and is_right else 1


def undisturbed(work: Path, script: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the steps of a run in one process."""
    words = ["-m", "worker", "run", "--json", "--job", script, "--", *arguments]
    done = subprocess.run(
        [sys.executable, *words], cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "loss" in line]


def kill_nodes(
    folder: Path, work: Path, script: str, arguments: Sequence[str], kills: int, seed: int
) -> dict[str, Any]:
    """Train on a cluster and kill nodes; return what came of it."""
    dice = random.Random(seed)
    place = LocalFolders(folder)
    with LocalCluster(place, MACHINES) as cluster:
        cluster.start()
        submit = [*SAILORCTL, "submit", script, "--id", "own"]
        told = ["--workdir", ".", "--server", f"unix://{place.socket}", "--", *arguments]
        subprocess.run([*submit, *told], cwd=work, check=True, stdout=subprocess.DEVNULL)
        log = StepLog(folder, "own")

        def job() -> dict[str, Any]:
            found: dict[str, Any] = cluster.client.ask("GET", "/v1/jobs/own")
            return found

        def look() -> None:
            log.read_new_lines()
            cluster.look_after()

        wait = partial(wait_for, within_s=WITHIN_S, told=job, meanwhile=look, every_s=0.02)

        def is_over() -> bool:
            return job()["state"] not in {"queued", "running"}

        def trains_again(after: int, steps: int) -> bool:
            fresh = [each for each in log.steps.values() if each.generation > after]
            return (len(fresh) >= steps and survives_a_loss()) or is_over()

        def survives_a_loss() -> bool:
            active = cluster.client.ask("GET", "/v1/status")["job"]
            return active is not None and active["safe_step"] is not None

        killed, missing, generation = 0, 0, 0
        while killed < kills:
            # A loss before the state has a copy elsewhere may take the last one.
            wait("it does not train", partial(trains_again, generation, dice.randint(1, 6)))
            if is_over():
                break
            status = cluster.client.ask("GET", "/v1/status")["job"]
            alive = [name for name in status["members"] if name in cluster.nodes]
            if not alive or status["safe_step"] is None:
                continue  # Another generation has begun meanwhile.
            generation = status["generation"]["number"]
            node = cluster.nodes[dice.choice(alive)]
            cluster.kill_node(node.name)
            killed += 1
            missing += 1
            while missing and (missing > 1 or dice.random() < 0.7):
                cluster.add_node(*dice.choice(MACHINES))
                missing -= 1
        wait("it does not end", is_over)
        log.read_new_lines()
        moves = cluster.client.ask("GET", "/v1/jobs/own/moves")["moves"]
        return {
            "script": script,
            "state": job()["state"],
            "reason": job()["reason"],
            "kills": killed,
            "generations": len({generation for generation, _ in log.steps}),
            "steps_lost": sum(move["steps_lost"] for move in moves),
            "steps": list(log.steps.values()),
            "unhandled": sum(UNHANDLED in each.read_text() for each in folder.glob("*.log")),
        }


def compared(steps: Sequence[LoggedStep], alone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how far all steps, repeated ones too, are from those of the undisturbed run."""
    wanted = dict(enumerate(alone, start=1))
    errors = {
        (each.generation, each.step): abs(each.loss / wanted[each.step]["loss"] - 1)
        for each in steps
    }
    return {
        "steps": len(wanted),
        "steps_missing": len(wanted.keys() - {each.step for each in steps}),
        "loss_error": max(errors.values()),
        "first_wrong": min((place for place in errors if errors[place] > TOLERANCE), default=None),
        "wrong_samples": sum(
            each.sample_hash != wanted[each.step]["sample_hash"] for each in steps
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
