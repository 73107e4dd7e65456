"""`make plan-tour`: a tour of simulator and planner, with real numbers.

It runs `sailorctl`, shows what it prints, and stops at the first unexpected result.
With --pause it waits for Enter between the steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "plan-tour"
JOB = HERE / "opt-350m.toml"
CLUSTER = HERE / "three-zones.toml"
MIXED = HERE / "opt-350m-plan.json"
FITS, DOES_NOT_FIT = 0, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause", action="store_true", help="wait for Enter between the steps")
    pause = parser.parse_args().pause and sys.stdin.isatty()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)

    say("Sailor keeps one training job running on whatever GPUs can be had.")
    say("Here is a job (OPT-350M) and a cluster: A100s in two zones, spot V100s far away.")

    step("1. The obvious plan: the A100s of one zone, four pipelines of one machine each.", pause)
    machine = {"gpu": "A100-40", "machine": "a2-highgpu-4g", "zone": "us-central1-a"}
    whole = [{"layers": [0, 26], "tp": 4, **machine}]
    obvious = plan("obvious", [pipeline(32, whole) for _ in range(4)], micro_batch=8)
    base = simulate(obvious)

    step("2. The planner's plan for the whole cluster.", pause)
    best = BUILD / "best.json"
    found = planned(best)
    compare("the planner's plan", found["estimate"], base)

    step(
        "3. Pipelines may differ in everything: cuts, kinds of GPU, TP, share of the batch.", pause
    )
    simulate(MIXED)
    say("=> Any such plan can be estimated. It shows why the planner left the V100s idle: their")
    say("   gradients have to cross the country.")

    step("4. A plan that asks too much of a V100: which device, by how much, and the cure.", pause)
    v100 = {"gpu": "V100-16", "machine": "V100-16x8", "zone": "us-west1-a"}
    greedy = plan("greedy", [pipeline(128, [{"layers": [0, 26], "tp": 1, **v100}])], micro_batch=8)
    simulate(greedy, expect=DOES_NOT_FIT)

    step("5. A machine is lost: three pipelines share the same batch, exactly.", pause)
    left = plan(
        "one-machine-less", [pipeline(count, whole) for count in (43, 43, 42)], micro_batch=8
    )
    after = simulate(left)
    compare("one machine less", after, base)

    step("6. Pictures of the planner's plan: a timeline for ui.perfetto.dev and a drawing.", pause)
    timeline, picture = relative(BUILD / "timeline.json"), relative(BUILD / "plan.svg")
    simulate(best, "--timeline", str(timeline), "--plot", str(picture))
    say(f"written: {timeline}, {picture}")


def pipeline(micro_batches: int, stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"micro_batches": micro_batches, "stages": stages}


def plan(name: str, pipelines: list[dict[str, Any]], *, micro_batch: int = 1) -> Path:
    """Write a plan file for the tour."""
    path = BUILD / f"{name}.json"
    document = {"micro_batch_size": micro_batch, "pipelines": pipelines}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def simulate(plan_file: Path, *more: str, expect: int = FITS) -> dict[str, Any]:
    """Show a command's text output, and return its JSON."""
    files = [str(relative(path)) for path in (plan_file, JOB, CLUSTER)]
    arguments = ["simulate", *files, *more]
    say("\n$ sailorctl " + " ".join(arguments))
    shown = sailorctl(arguments)
    say((shown.stdout + shown.stderr).rstrip())
    if shown.returncode != expect:
        raise SystemExit(f"the tour expected exit code {expect}, not {shown.returncode}")
    result: dict[str, Any] = json.loads(sailorctl(["simulate", *files, "--json"]).stdout)
    return result


def planned(best: Path) -> dict[str, Any]:
    """Let the planner find a plan and keep it."""
    files = [str(relative(path)) for path in (JOB, CLUSTER)]
    arguments = ["plan", *files, "--save", str(relative(best))]
    say("\n$ sailorctl " + " ".join(arguments))
    shown = sailorctl(arguments)
    say((shown.stdout + shown.stderr).rstrip())
    if shown.returncode != 0:
        raise SystemExit(f"the tour expected a plan, not exit code {shown.returncode}")
    result: dict[str, Any] = json.loads(sailorctl(["plan", *files, "--json"]).stdout)
    return result


def sailorctl(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("sailorctl")
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, cwd=HERE.parent
    )


def compare(what: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Two plans as ratios."""
    speed = now["throughput_samples_per_s"] / before["throughput_samples_per_s"]
    line = f"=> {what}: {speed:.2f} times the throughput of the obvious plan"
    if now["cost_usd_per_iteration"] and before["cost_usd_per_iteration"]:
        cost = now["cost_usd_per_iteration"] / before["cost_usd_per_iteration"]
        line += f", {cost:.2f} times its price per iteration"
    say(line)


def step(title: str, pause: bool) -> None:
    say("\n" + title)
    if pause:
        try:
            input("   [Enter] ")
        except (EOFError, KeyboardInterrupt):
            raise SystemExit("\nThe tour ends here; nothing was left running.") from None


def relative(path: Path) -> Path:
    return path.relative_to(HERE.parent)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
