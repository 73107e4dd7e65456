"""Break one rule of the control plane at a time and see which tests fail: ``-m tests.mutations``.

Each mutation is made in a copy of the repository, never in the working tree. What is named on
the command line is tried; else all of them. A mutation that nothing catches needs a test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.mutations.difference_mutations import DIFFERENCE_MUTATIONS
from tests.mutations.mutation import Mutation, core
from tests.mutations.question_mutations import QUESTION_MUTATIONS
from tests.mutations.release_mutations import RELEASE_MUTATIONS
from tests.mutations.seal_mutations import SEAL_MUTATIONS
from tests.mutations.stop_mutations import STOP_MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("agents", "examples", "planner", "sailord", "simulator", "tests", "worker")
TIMEOUT_S = 1800.0
TESTS = {
    "sailord/core": ("tests/stories", "tests/sailord/core"),
    "sailord/capacity/core": ("tests/sailord/capacity",),
    "agents/core": ("tests/agents/core",),
}
"""Folders of decisions, and the tests that must notice a change in them."""


MUTATIONS = [
    *SEAL_MUTATIONS,
    *RELEASE_MUTATIONS,
    *STOP_MUTATIONS,
    *core(
        "sailord/core/rules/phase_rules.py",
        (
            "members are woken before the generation is stored",
            "    if active.generation != phase.record:\n        return WAIT\n",
            "    active = replace(active, generation=phase.record)\n"
            "    state = replace(state, active=active)\n",
        ),
        (
            "a stop has no deadline",
            "is_alive(state, active) and state.now < phase.deadline:",
            "is_alive(state, active):",
        ),
        (
            "a generation opens on a lost node",
            "if not set(phase.then.members) <= set(usable(state, active)):",
            "if not phase.then.members:",
        ),
        (
            "a start has no deadline",
            "    if state.now >= phase.deadline:\n        return fail(state, active)\n",
            "",
        ),
        (
            "failures are never cleared",
            "if active.attempts.failures and is_healthy(state, active):",
            "if False:",
        ),
        (
            "a stuck generation is never given up",
            "if state.now >= active.progress.advanced_at + stall_s(state.options, active):",
            "if state.now >= active.progress.advanced_at + 999 * stall_s(state.options, active):",
        ),
    ),
    *core(
        "sailord/core/rules/job_rules.py",
        (
            "a held job gives up steps that only memory holds",
            "return not unsaved_steps(state, active)",
            "return True",
        ),
        (
            "a job whose limits pay for no plan keeps the cluster",
            "if not (asked.is_refused and asked.is_unpaid) or",
            "if asked.is_unpaid or",
        ),
        (
            "a held job yields while its workers compute",
            "or _has_workers(state, active):",
            "or False:",
        ),
    ),
    *core(
        "sailord/core/queries/unprepared_nodes.py",
        (
            "a job is held while a node is being prepared",
            'report.unfit not in ("", PREPARING)',
            'report.unfit != ""',
        ),
    ),
    *core(
        "sailord/core/decide.py",
        (
            "a generation opens while a commit is being stored",
            "    await_commit,\n    #",
            "    #",
        ),
        (
            "a job that gets the cluster is written before the one that leaves it",
            "key=lambda job: (job.state in LIVE, job.id)",
            "key=lambda job: (job.state not in LIVE, job.id)",
        ),
    ),
    *core(
        "sailord/core/model/rule.py",
        (
            "a changed job record is not written",
            "return Step(state.with_job(job), (WriteJob(job),))",
            "return Step(state.with_job(job))",
        ),
    ),
    *QUESTION_MUTATIONS,
    *core(
        "sailord/core/rules/transitions.py",
        (
            "failures are never forgotten",
            "return steps_done >= state.options.steps_of_health",
            "return False",
        ),
        (
            "a lost machine counts as a failed attempt",
            "is_fault = not is_explained(state, active.generation)",
            "is_fault = True",
        ),
        (
            "a failing job is never held",
            "if failures >= options.failures_until_held:",
            "if failures >= 99 * options.failures_until_held:",
        ),
    ),
    *core(
        "sailord/core/learn.py",
        (
            "an answer to an older question counts",
            "    if active.question.request != event.request:\n"
            "        return state  # The answer to a question that is no longer open.\n",
            "",
        ),
        (
            "a notice applies to the next node of that name",
            "NodeId(order.life) or lives",
            "lives",
        ),
        (
            "a repeated order has two effects",
            "        if order.id in heard:\n            continue\n",
            "",
        ),
        (
            "a stopped leader gives up nodes for its own silence",
            "stood_still = event.at > state.now + state.options.still_s",
            "stood_still = False",
        ),
    ),
    *core(
        "sailord/core/node_lifecycle.py",
        (
            "a stale probe failure counts",
            "if node.probed_at is not None and node.heard_at >= node.probed_at:",
            "if False:",
        ),
        (
            "a stale report counts",
            "or (node.report is not None and report.number <= node.report.number):",
            "or (node.report is not None and report.number < 0):",
        ),
        (
            "a restarted agent is not noticed",
            "if names.get(node.record.name, id_) != id_ and not node.is_lost:",
            "if node.record.name == id_ and not node.is_lost:",
        ),
        (
            "an expired lease is a loss although steps go on",
            "if state.now < state.active.progress.advanced_at + waits_s:",
            "if False:",
        ),
        (
            "a new leader grants no grace period",
            "if state.now < state.trusted_since(node):",
            "if state.now < state.leases_since:",
        ),
        (
            "a node back after an expired lease loses its marks",
            "    for order in state.marks.get(record.id, ()):\n"
            "        node = mark(node, order, state.now)\n",
            "",
        ),
    ),
    *core(
        "sailord/core/queries/active_job.py",
        (
            "a parked member need not have sealed",
            "        if all(sealed.point != point for sealed in report.sealed):\n"
            "            return None\n",
            "",
        ),
        (
            "a record is written while a stop is being stored",
            'return active.generation is not None and active.generation.state == "open"',
            "return False",
        ),
        (
            "reports of another generation count",
            "        and node.report.speaks_of(generation)\n",
            "",
        ),
        (
            "a stop is ordered although a member leaves within a step",
            "needed = state.now + 1.5 * step_s",
            "needed = state.now - 1.5 * step_s",
        ),
    ),
    *core(
        "sailord/core/queries/restore_choice.py",
        (
            "an unreachable node is waited for forever",
            "return isinstance(node.standing, Unreachable) and is_over",
            "return False",
        ),
        (
            "a new leader restores before it has heard the snapshot holders",
            "return heard and not any(",
            "return True or any(",
        ),
    ),
    *core(
        "sailord/core/model/nodes.py",
        (
            "a draining node is planned for",
            "        if self.is_draining or not self._is_sound:",
            "        if not self._is_sound:",
        ),
    ),
    *core(
        "sailord/core/rules/straggler_rules.py",
        (
            "stragglers are never taken back",
            "    if not active.asked.is_refused:\n        return PASS\n    slow",
            "    if active.job:\n        return PASS\n    slow",
        ),
    ),
    *DIFFERENCE_MUTATIONS,
    *core(
        "sailord/core/queries/replan_triggers.py",
        (
            "a broken connection alone never ends a generation",
            "if broken_since is not None and state.now >= ",
            "if broken_since is not None and state.now >= 9999 + ",
        ),
    ),
    *core(
        "sailord/core/rules/checkpoint_rules.py",
        (
            "garbage is collected while a rollback is ordered",
            'if any(order.kind == "rollback" for order in active.orders):',
            "if False:",
        ),
        (
            "a failing checkpoint blocks later ones",
            "key=lambda point: (point == failed_at, point)",
            "key=lambda point: point",
        ),
        (
            "a checkpoint of an older generation is committed",
            "if upload.point.generation == record.number and not is_late and",
            "if not is_late and",
        ),
        (
            "an incomplete checkpoint is committed",
            "return tuple(chosen) if held == whole else None",
            "return tuple(chosen)",
        ),
        (
            "a piece is committed twice",
            "if own and not own & held:",
            "if own:",
        ),
    ),
    *core(
        "agents/core/decide.py",
        (
            "an agent ends while others fetch from its memory",
            "if not state.is_leaving or _is_needed_by_others(state):",
            "if not state.is_leaving:",
        ),
        (
            "a generation is joined while the last one has the devices",
            "    if gang is None:\n        return _join(state) or _exit(state)\n",
            "    joined = _join(state) or (_exit(state) if gang is None else None)\n"
            "    if gang is None or joined is not None:\n"
            "        return joined\n",
        ),
        (
            "a deposed leader is obeyed",
            "if fence.term < state.heard.term:",
            "if fence.term < 0:",
        ),
        (
            "an abandoned generation is joined again",
            "return record.number > state.left and record.number",
            "return record.number",
        ),
        (
            "a restarted agent ends the workers that it finds",
            "if state.has_read_store and not _is_wanted(state, gang):",
            "if not _is_wanted(state, gang):",
        ),
        (
            "a cut-off agent parks workers although their steps go on",
            "still_since = max(state.store_silent_since, gang.advanced_at, state.resumed_at)",
            "still_since = state.store_silent_since",
        ),
        (
            "unresponsive workers are never killed",
            "is_due = state.now >= leave_by(state.options, gang, gang.abort_sent_at)",
            "is_due = False",
        ),
        (
            "a stale record is followed",
            " and record.number < state.heard.generation:",
            " and record.number < 0:",
        ),
        (
            "any sender may release snapshots",
            "if event.term < state.heard.term or event.job != state.job:",
            "if event.job != state.job:",
        ),
    ),
]

NOTHING_RAN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
LIVES_FEW, LIVES_MANY = 15, 300
"""Seeds of the simulation; the larger number if no other test failed."""


def catch(mutation: Mutation, folder: Path, *, every: bool = False) -> list[str]:
    """Return the kind of tests that fails first in a copy with the mutation, or all that fail."""
    path = folder / mutation.path
    text = path.read_text(encoding="utf-8")
    found = text.count(mutation.old)
    assert found == 1, f"{mutation.name}: {found} places in {mutation.path}"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        found = red(folder, mutation.path)
        return list(found) if every else list(islice(found, 1))
    finally:
        path.write_text(text, encoding="utf-8")


def control(folder: Path) -> list[str]:
    """Return what fails although nothing is broken: only whitespace changes at each place."""
    before = {path: path.read_text("utf-8") for path in {folder / m.path for m in MUTATIONS}}
    for path, text in before.items():
        changed = text
        for old in {m.old for m in MUTATIONS if folder / m.path == path}:
            changed = changed.replace(
                old, f"{old} " if "\n" not in old else old.replace("\n", " \n")
            )
        path.write_text(changed, "utf-8")
    try:
        return list(red(folder))
    finally:
        for path, text in before.items():
            path.write_text(text, "utf-8")


def red(folder: Path, changed: str = "") -> Iterator[str]:
    """Yield which tests of decisions fail, those of a changed module first, and then the lives."""
    kinds = sorted({path for paths in TESTS.values() for path in paths})
    own = [path for core in TESTS if changed.startswith(f"{core}/") for path in TESTS[core]]
    is_caught = False
    for kind in dict.fromkeys([*own, *kinds]):
        if fails(pytest_command(kind), folder):
            is_caught = True
            yield kind
    counts = [LIVES_FEW] if is_caught else [LIVES_FEW, LIVES_MANY]
    if any(fails(["-m", "tests.sim", "--seeds", str(count)], folder) for count in counts):
        yield "tests/sim"


def pytest_command(*paths: str) -> list[str]:
    """Return the command that runs these tests up to the first failure."""
    return ["-m", "pytest", "-q", "-x", "--tb=no", *paths]


def fails(command: list[str], folder: Path) -> bool:
    """Return whether a program fails or takes too long; raise if there was nothing to run."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Its own processes, too.
    if code in NOTHING_RAN:
        raise RuntimeError(f"no test was run by {' '.join(command)}")
    return code != 0


def copy_to(folder: Path) -> Path:
    """Copy what the tests need into the folder."""
    for part in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def main() -> int:
    """Print a line for each mutation: its name and what caught it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all if there are none")
    parser.add_argument("--at-once", type=int, default=1, help="how many are tried at a time")
    every = "name all tests that catch each one, not only the first"
    parser.add_argument("--every", action="store_true", help=every)
    asked = parser.parse_args()
    names = asked.names
    chosen = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    survived = 0
    with (
        tempfile.TemporaryDirectory(prefix="sailor-mutations-") as base,
        ThreadPoolExecutor(asked.at_once) as pool,
    ):
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.at_once):
            folders.put(copy_to(Path(base, str(number))))

        def attempt(mutation: Mutation | None) -> list[str]:
            folder = folders.get()
            try:
                if mutation is None:
                    return control(folder)
                return catch(mutation, folder, every=asked.every)
            finally:
                folders.put(folder)

        if caught := attempt(None):
            print(f"these tests fail without any mutation: {', '.join(caught)}")
            return 1
        for mutation, caught in zip(chosen, pool.map(attempt, chosen), strict=True):
            survived += not caught
            by = ", ".join(caught) or "NOTHING"
            print(f"{mutation.path}: {mutation.name}: {by}", flush=True)
    print(f"{len(chosen)} mutations, {survived} survived")
    return 1 if survived else 0
