"""Trains a job on this machine: checks and opens everything, then forks the ranks."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from simulator.documents.problems import InputError, Problem, Problems
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import load_plan
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.by_tensor.resume import OPTION, ResumePoint, open_resume_point
from worker.checkpoint.compatibility import dtype_of
from worker.checkpoint.other_formats.convert import external_names, write_config
from worker.cli.local_launcher import ended_by_signals, in_fork, run_ranks
from worker.cli.local_rank import RunSpec, train
from worker.cli.own_output import printing_to_stderr
from worker.control.preload import preload
from worker.data.batch import DataSource
from worker.data.sources.open_data import open_data
from worker.engines import select
from worker.engines.deepspeed import config as deepspeed_config
from worker.layout.rank_layout import TIED, RankPlace, plan_problems, rank_places
from worker.layout.tensor_table import tensors_of
from worker.models.apply_plan import ShardValues
from worker.models.built_in import exact
from worker.models.starting_weights import open_weights
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.fault_injection import FAIL_POINT, FailPoint
from worker.profiling.timeline import RankTimeline, Span, trace
from worker.reporting.progress_display import ProgressDisplay
from worker.script.hf_model import check_not_overwritten
from worker.script.one_rank_plan import one_rank_plan
from worker.script.open_job import names_module, open_job, open_module
from worker.training.full_tensors import RankTensors, merge_ranks
from worker.types import ACTIVITIES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``python -m worker run``."""

    job: Path
    plan: Path | None
    resume: str | None
    steps: int | None
    engine: str | None
    deepspeed_config: Path | None
    as_json: bool
    timeline: Path | None
    save: Path | None
    ranks_max: int | None
    device: str | None
    arguments: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether the job is a script."""
        return self.job.suffix == ".py"


def train_alone(options: RunOptions) -> None:
    """Train a job under a plan on this machine, without a daemon."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # A script may compute here and must not start threads.
    if options.arguments and not options.is_script:
        cure = "leave them out; only a script takes arguments"
        raise InputError(Problem(str(options.job), "is a job file, and arguments are given", cure))
    # Whatever a script starts or opens here would be lost or shared when the ranks are forked.
    has_module = names_module(options.job)
    job = in_fork(partial(_module_job, options)) if has_module else load_job(options.job)
    with ended_by_signals(), ExitStack() as stack:
        spec = _prepare(options, job, threads, stack, has_module=has_module)
        places, ranks = rank_places(spec.plan), spec.plan.device_count
        results = _RunResults(ProgressDisplay(spec.steps, as_json=options.as_json))
        board = ActivityBoard(ranks)
        body = partial(train, spec, board=board)
        with results.progress:
            run_ranks(body, ranks=ranks, board=board, on_message=results.on_message)
        if spec.pieces is not None and options.save is not None:
            # Save first: a failure of another output must not lose the weights.
            _save(spec, ranks, spec.pieces, options.save)
        results.progress.finish(_summary(places, results, spec.device))
        if options.timeline is not None:
            _write_timeline(options.timeline, places, results)


def _module_job(options: RunOptions) -> Job:
    """Return the job of a script or of a model of transformers."""
    # stdout has one line for each step, and nothing that a script or a library prints.
    with printing_to_stderr():
        job, recipe = open_job(options.job, options.arguments)
        if options.save is not None:
            check_not_overwritten(recipe.source, options.save)
        for note in recipe.notes():
            print(f"note: {note}")
    return job


def _prepare(
    options: RunOptions, job: Job, threads: int, stack: ExitStack, *, has_module: bool
) -> RunSpec:
    """Read, check and open everything; report all problems at once."""
    problems, folder = Problems(), options.job.parent
    plan = _collect_problems(problems, lambda: _plan(options, job))
    data: DataSource | None = None
    weights: Callable[[int], ShardValues] | None = None
    if not has_module:
        data = _collect_problems(problems, lambda: open_data(job, folder))
        weights = _collect_problems(problems, lambda: open_weights(job, folder))
    _collect_problems(problems, lambda: _check_writable(options.timeline))
    pieces = _collect_problems(problems, lambda: stack.enter_context(_pieces_folder(options.save)))
    config = _collect_problems(problems, lambda: _deepspeed_config(options, plan, job))
    if options.steps is None and job.steps is None:
        problems.add("--steps", "is missing, and the job has no number of steps")
    device = _collect_problems(
        problems, lambda: _device(options.device, plan.device_count if plan else 1)
    )
    if config is not None and device == "cpu" and job.precision == "fp16":
        problems.add("[training] precision", "is fp16, which DeepSpeed does not have on CPUs")
    fail_at = _collect_problems(problems, lambda: _fail_point(plan))
    problems.raise_if_any()
    assert plan is not None
    assert device is not None
    preload()
    # From here on, a storage backend may start threads, which only wait.
    beginning = None if options.resume is None else open_resume_point(options.resume, job)
    ranks = plan.device_count
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=ranks))
    return RunSpec(
        job=job,
        plan=plan,
        data=data,
        weights=weights,
        module=options.job if has_module else None,
        arguments=options.arguments,
        beginning=beginning,
        steps=_steps(options, job, beginning),
        device=device,
        threads=max(1, threads // ranks),
        listening=listening,
        keeps_spans=options.timeline is not None,
        fail_at=fail_at,
        deepspeed=config,
        pieces=pieces,
    )


def _steps(options: RunOptions, job: Job, beginning: ResumePoint | None) -> int:
    """Return the number of steps to train; the job's total includes those before a checkpoint."""
    if options.steps is not None:
        return options.steps
    assert job.steps is not None, "checked before"
    done = 0 if beginning is None else beginning.progress.step
    if done >= job.steps:
        what = f"the checkpoint is of step {done}, and the job ends at step {job.steps}"
        raise InputError(Problem(OPTION, what, "give --steps to train more"))
    return job.steps - done


def _collect_problems(problems: Problems, act: Callable[[], T]) -> T | None:
    """Run ``act``; collect its problems so that the other checks can run too."""
    try:
        return act()
    except InputError as error:
        problems.take(error)
        return None


@dataclass(slots=True)
class _RunResults:
    """The messages of the ranks."""

    progress: ProgressDisplay
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "step":
            self.progress.step(message)
        elif kind == "evaluation":
            self.progress.evaluation(message["step"], message["metrics"])
        else:
            self.summaries[rank] = message


# -- options ---------------------------------------------------------------------------------------


def _plan(options: RunOptions, job: Job) -> Plan:
    found = list(exact.exact_problems(job)) if job.model.family == "exact" else []
    plan = one_rank_plan(job) if options.plan is None else load_plan(options.plan)
    place = "plan" if options.plan is None else options.plan.name
    found += plan_problems(plan, job, place=place)
    ranks = plan.device_count
    if options.ranks_max is not None and ranks > options.ranks_max:
        what = f"needs {ranks} ranks, more than the {options.ranks_max} allowed"
        found.append(Problem(place, what, "raise --ranks-max or give a smaller plan"))
    if found:
        raise InputError(found)
    return plan


def _deepspeed_config(options: RunOptions, plan: Plan | None, job: Job) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration; ``None``: the sailor engine trains."""
    if (options.engine or job.engine) == "sailor":
        if options.deepspeed_config is not None:
            what, cure = "is not used by the sailor engine", "give --engine deepspeed"
            raise InputError(Problem("--deepspeed-config", what, cure))
        return None
    if importlib.util.find_spec("deepspeed") is None:
        what = "the package deepspeed is not installed"
        raise InputError(Problem("--engine", what, "install it, or give --engine sailor"))
    found = []
    if options.timeline is not None:
        what = "the DeepSpeed engine records no timeline"
        found.append(Problem("--timeline", what, "give --engine sailor"))
    if plan is not None:
        place = "plan" if options.plan is None else options.plan.name
        found += select.deepspeed_problems(plan, job, place=place)
    if found or plan is None:
        raise InputError(found or Problem("--engine", "there is no plan for it"))
    return deepspeed_config.read_config(options.deepspeed_config, plan, job)


def _device(requested: str | None, ranks: int) -> str:
    # Counting devices initialises none of them.
    count = torch.cuda.device_count()
    if requested == "cuda" and count < ranks:
        what = f"{ranks} ranks need as many GPUs, and there are {count} here"
        raise InputError(Problem("--device", what, "give --device cpu or a smaller plan"))
    return requested or ("cuda" if count >= ranks else "cpu")


def _fail_point(plan: Plan | None) -> FailPoint | None:
    text = os.environ.get(FAIL_POINT)
    if text is None:
        return None
    point = FailPoint.parse(text)
    ranks = plan.device_count if plan is not None else None
    if (
        point is None
        or (point.activity not in ACTIVITIES or point.generation)
        or (point.rank is None or point.step is None)
        or (ranks is not None and point.rank >= ranks)
    ):
        what = f"is {text!r}, not a rank of the plan, or not an activity"
        raise InputError(Problem(FAIL_POINT, what, "use RANK:ACTIVITY:STEP, such as 1:backward:2"))
    return point


# -- output ----------------------------------------------------------------------------------------


def _check_writable(path: Path | None) -> None:
    """Check before training that a file can be written; its content stays until then."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise _describe_unwritable(path, error) from None


@contextmanager
def _pieces_folder(folder: Path | None) -> Iterator[Path | None]:
    """Create a folder for the ranks' shards, next to where they are merged."""
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pieces = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder)
    except OSError as error:
        raise _describe_unwritable(folder, error) from None
    with pieces as name:
        yield Path(name)


def _describe_unwritable(path: Path, error: OSError) -> InputError:
    what = f"cannot be written: {error.strerror or error}"
    return InputError(Problem(str(path), what, "name another place"))


def _summary(
    places: tuple[RankPlace, ...], results: _RunResults, device: str
) -> list[dict[str, Any]]:
    return [
        {
            "rank": place.rank,
            "pipeline": place.pipeline,
            "stage": place.stage,
            "tp_index": place.index,
            "layers": [list(chunk.layers) for chunk in place.chunks],
            "device": device,
            "peak_memory_bytes": results.summaries[place.rank]["peak_memory_bytes"],
        }
        for place in places
    ]


def _write_timeline(path: Path, places: tuple[RankPlace, ...], results: _RunResults) -> None:
    timelines = [
        RankTimeline(place, tuple(Span(**span) for span in results.summaries[place.rank]["spans"]))
        for place in places
    ]
    text = json.dumps(trace(timelines), separators=(",", ":"), allow_nan=False)
    with _with_path(path):
        path.write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Add the path to errors that lack it, such as a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        strerror = getattr(error, "strerror", None) or str(error)
        raise OSError(getattr(error, "errno", None) or errno.EIO, strerror, str(path)) from None


def _read_shard(path: Path) -> RankTensors:
    return {
        key: [(None if held is None else range(*held), part) for held, part in parts]
        for key, parts in torch.load(path, weights_only=True).items()
    }


def _save(spec: RunSpec, ranks: int, pieces: Path, folder: Path) -> None:
    """Merge the ranks' shards into one file, under the module's names or Hugging Face's."""
    job = spec.job
    shares = [_read_shard(pieces / f"{rank}.pt") for rank in range(ranks)]
    merged = merge_ranks(shares, tensors_of(job))
    whole = {(0 if layer == TIED else layer, name): t for (layer, name, _), t in merged.items()}
    if spec.module is not None:
        with _with_path(folder), printing_to_stderr():
            open_module(spec.module, job, spec.arguments).save(whole, folder)
        return
    unfinished = pieces / "model.safetensors"
    with _with_path(folder):
        save_file(external_names(job, whole), unfinished, metadata={"format": "pt"})
        unfinished.replace(folder / "model.safetensors")
        write_config(job.model, getattr(torch, dtype_of(job)), folder)
