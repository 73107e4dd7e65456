"""``python -m tests.chaos``: run a storm of faults and check the protocol's invariants."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

from agents.protocol.records import JobId
from sailord.local.cluster import ClusterError
from sailord.local.paths import MEMORY
from sailord.local.signals import ended_by_signals
from sailord.local.tour.reference_run import start_reference_run
from sailord.local.tour.story import TOLERANCE
from tests.chaos.checker import judge
from tests.chaos.cluster import ChaosCluster, ChaosPlace, mount, unmount
from tests.chaos.job_driver import Stuck
from tests.chaos.net import Net, Proxies
from tests.chaos.points import ALL, Passes
from tests.chaos.recorder import Recorder, read_steps
from tests.chaos.storm import Storm
from tests.chaos.story import read_story
from tests.processes import left_behind

ROOT = Path(__file__).resolve().parents[2]
FIRST_NODES = (
    ("large", "zone-a"),
    ("large", "zone-a"),
    ("large", "zone-b"),
    ("large", "zone-b"),
    ("small", "zone-c"),
)
JOBS: dict[str, tuple[str, float]] = {
    "exact": ("exact.toml", 0.0),
    "tale": ("job.toml", TOLERANCE),
}
"""Each job's file, and the relative tolerance of its losses to the uninterrupted run's."""
COMPARED = 150
"""Steps compared of a job with rounding errors. Later, even two undisturbed runs under different
plans differ by more than the tolerance, because training amplifies each difference."""
MOUNTED = "SAILOR_CHAOS_MOUNTS"
MS_PRIVATE, MS_REC = 1 << 18, 16384
DURABLE_BYTES = 1 << 30
LONG_S = 600.0
"""In a storm of this length every rule must have applied."""


def main() -> int:
    """Run the storm that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--job", choices=JOBS, default="exact", help="the job to train")
    parser.add_argument("--store", choices=("embedded", "etcd"), default="embedded")
    parser.add_argument("--checkpoints", choices=("folder", "objects"), default="folder")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from fault to fault")
    parser.add_argument("--points", type=int, default=0, help="fail points to try")
    parser.add_argument("--skip", type=int, default=0, help="fail points to skip")
    parser.add_argument("--point", action="append", help='as in "sailord at WakeAgents"')
    parser.add_argument(
        "--within", type=float, default=math.inf, help="time limit for the fail points"
    )
    parser.add_argument("--pairs", type=float, default=0.0, help="seconds for pairs of fail points")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="inject this kind of fault only")
    parser.add_argument("--folder", type=Path, required=True, help="a short path; it is created")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the recording")
    asked = parser.parse_args()
    if MOUNTED not in os.environ:
        in_own_name_space()
    return run(asked)


def in_own_name_space(module: str = "tests.chaos") -> None:
    """Start this program again in a private mount namespace, if the system allows one."""
    word = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    does = shutil.which("unshare") and os.spawnvp(os.P_WAIT, word[0], [*word, "true"]) == 0
    words = [*(word if does else []), sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(words[0], words, {**os.environ, MOUNTED: "1" if does else ""})


def run(asked: argparse.Namespace) -> int:
    """Run one storm; return the exit status."""
    has_mounts = bool(os.environ[MOUNTED])
    asked.folder.mkdir(parents=True)
    shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True)
    folder = asked.folder / "c"
    proxies = Proxies(Net(), folder, has_etcd=asked.store == "etcd")
    place = ChaosPlace(folder, proxies=proxies, has_mounts=has_mounts)
    cluster = ChaosCluster(place, FIRST_NODES)
    cluster.durable.mkdir()
    if has_mounts:
        mount("none", Path("/"), "", MS_REC | MS_PRIVATE, "")
        mount("tmpfs", MEMORY, "tmpfs", 0, "mode=1777")
        mount("tmpfs", cluster.durable, "tmpfs", 0, f"size={DURABLE_BYTES}")
    begun_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun_s:7.1f} s  {text}", flush=True)

    tolerance = JOBS[asked.job][1]
    about = {"job": asked.job, "tolerance": tolerance, "compared": COMPARED if tolerance else None}
    (asked.out / "about.json").write_text(json.dumps(about))
    recorder = Recorder(cluster, asked.out, JobId(asked.job))
    storm = Storm(
        cluster,
        recorder,
        asked.job,
        random.Random(asked.seed),
        say,
        tuple(asked.only or ()),
        has_objects=asked.checkpoints == "objects",
    )
    code = 1
    with ended_by_signals():
        try:
            job = job_text(cluster, asked)
            storm.begin(job)
            reference = start_reference_run(place.folder, asked.job, job)
            say("it trains")
            passes = fail(storm, asked)
            storm.inject_faults(asked.seconds, asked.every)
            say("the storm is over")
            final = storm.settle()
            say(f"ended after step {final}; the uninterrupted run catches up")
            os.sched_setscheduler(reference.process.pid, os.SCHED_OTHER, os.sched_param(0))
            reference.losses(final)
            reference.end()
            storm.sweep()
            (asked.out / "final.json").write_text(json.dumps({"step": final}))
            (asked.out / "points.json").write_text(
                json.dumps({"passed": passes.passed, "missed": passes.missed})
            )
            code = 0
        except (Stuck, ClusterError) as failure:
            say(f"error: {failure}")
            recorder.write("breaches", {"at": time.time(), "text": str(failure)})
        finally:
            recorder.end()
            collect(storm, place, asked.out)
            cluster.close()
            left = left_behind(cluster.place)
            for each in left:
                recorder.write("breaches", {"at": time.time(), "text": f"left behind: {each}"})
            if has_mounts:
                unmount(cluster.durable)
            shutil.rmtree(asked.folder, ignore_errors=True)
    return verdict(asked, storm) or code


def verdict(asked: argparse.Namespace, storm: Storm) -> int:
    """Print a summary and every violation; return 1 if there are any."""
    story = read_story(asked.out)
    said = judge(story)
    found = said.violations
    for each in found:
        print(each)
    (asked.out / "verdict.json").write_text(json.dumps(asdict(said)))
    print("applied: " + ", ".join(f"{name} {count} times" for name, count in said.asked.items()))
    # I9 needs a piece that several ranks write, which only the exact job's uneven layers give.
    idle = [name for name in said.idle if name != "I9" or asked.job == "exact"]
    if idle:
        print(f"NOTHING WAS SHOWN of {', '.join(idle)}: no moment at which they apply")
    print(
        f"{sum(storm.faults.values())} faults, {len(story.opened)} generations, "
        f"{story.final_step} steps, {len(story.commits)} checkpoints, held {storm.resumed} times; "
        f"{len(found)} violations"
    )
    is_long = asked.seconds >= LONG_S and not asked.only
    return 1 if found or (is_long and idle) else 0


def fail(storm: Storm, asked: argparse.Namespace) -> Passes:
    """Try the chosen fail points one by one, then pairs of them, in the seed's order."""
    passes = Passes(storm)
    end = time.monotonic() + asked.within
    order = storm.rng.sample(ALL, len(ALL))
    named = [point for word in asked.point or () for point in ALL if str(point).startswith(word)]
    passes.run([(point,) for point in (*named, *order[asked.skip :][: asked.points])], end)
    pairs = [pair for pair in combinations(ALL, 2) if pair[0].actor != pair[1].actor]
    storm.rng.shuffle(pairs)
    passes.run(pairs, time.monotonic() + asked.pairs)
    for each in passes.missed:
        storm.breach(f"fail point never reached: {each}")
    return passes


def job_text(cluster: ChaosCluster, asked: argparse.Namespace) -> str:
    """Return the text of a job of `sailorctl up`, with checkpoints."""
    text = cluster.place.job(JOBS[asked.job][0])
    kind = "faulty" if asked.checkpoints == "objects" else "file"
    often = "memory_every = 1\npersist_every = 10"
    return f'{text}\n[checkpoint]\nuri = "{kind}://{cluster.durable}"\n{often}\n'


def collect(storm: Storm, place: ChaosPlace, out: Path) -> None:
    """Copy steps, logs, losses and reconfigurations from the cluster's folder to the recording."""
    with (out / "steps.jsonl").open("w") as file:
        for line in read_steps(place.folder, storm.job):
            file.write(json.dumps(line) + "\n")
    logs = out / "logs"
    logs.mkdir()
    for path in place.folder.glob("*.log"):
        shutil.copyfile(path, logs / path.name)
    for path in place.folder.glob("*/process/*/output"):
        shutil.copyfile(path, logs / f"{path.parts[-4]}.{path.parts[-2]}.output")
    losses = place.folder / f"{storm.job}.losses"
    if losses.exists():
        shutil.copyfile(losses, out / "reference.jsonl")
    try:
        moves = storm.cluster.client.ask("GET", f"{storm.path}/moves")
    except Exception as error:
        moves = {"moves": [], "error": str(error)}
    (out / "moves.json").write_text(json.dumps(moves))


if __name__ == "__main__":
    sys.exit(main())
