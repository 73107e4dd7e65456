"""The ``Trainer`` of ``import sailor``: what a script gives, and training it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader

from simulator.documents.problems import InputError, Problem, Problems
from simulator.models.layers import Precision
from simulator.spec.job import RecomputePolicy
from worker.data.datasets.blend import Blend
from worker.data.datasets.map_dataset import Collate, Dataset, default_collate
from worker.data.datasets.stream import Stream
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.reporting.loggers import Logger
from worker.reporting.progress_display import ProgressDisplay
from worker.script.loader_parts import data_of
from worker.script.losses import Loss
from worker.script.one_rank_plan import one_rank_plan
from worker.script.recipe import Recipe
from worker.script.script_reports import Callback
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.step_report import StepReport
from worker.training.trainer import RankTrainer

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

on_train: Callable[[Recipe], None] | None = None
"""Takes the recipe instead of training it; see ``worker.script.load``."""


class Trainer:
    """Trains a module under any plan: alone, on this machine's cluster, or under sailord.

    ``model`` is a module, or a function that makes one, which is called under ``seed``. The page
    ``docs/own-model.md`` describes all arguments.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Dataset | DataLoader[Any],
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | MakeScheduler | None = None,
        collate: Collate | None = None,
        call: Callable[[nn.Module, Any], Any] | None = None,
        eval_dataset: Dataset | DataLoader[Any] | None = None,
        eval_every: int | None = None,
        metrics: Mapping[str, Loss] | None = None,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback] = (),
        precision: Precision = "fp32",
        recompute: RecomputePolicy = "auto",
        clip_norm: float | None = None,
        skip_nonfinite: int = 3,
        max_tp: int = 8,
        seed: int = 0,
        shuffle: bool | None = None,
        name: str | None = None,
    ) -> None:
        problems = Problems()
        counts = {
            **{"batch_size": (batch_size, 1), "steps": (steps, 1), "eval_every": (eval_every, 1)},
            **{"skip_nonfinite": (skip_nonfinite, 0), "max_tp": (max_tp, 1), "seed": (seed, 0)},
        }
        _check_counts(counts, problems)
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            name = optimizer.__name__
            cure = f"give one, or a function: lambda model: {name}(model.parameters(), lr=...)"
            problems.add("Trainer", f"has optimizer={name}, a class", cure)
        if epochs is not None and not (_is_above_0(epochs) and epochs < math.inf):
            problems.add("Trainer", f"has epochs={epochs!r}", "give a number above 0")
        if clip_norm is not None and not _is_above_0(clip_norm):
            cure = "give the largest norm of a gradient, or None to clip nothing"
            problems.add("Trainer", f"has clip_norm={clip_norm!r}", cure)
        _check_word("precision", precision, get_args(Precision), problems)
        _check_word("recompute", recompute, get_args(RecomputePolicy), problems)
        if (steps is None) == (epochs is None):
            problems.add("Trainer", "needs steps or epochs", "give one of the two")
        if "loss" in (metrics or {}):
            what = "has a metric with the name loss, as which the loss itself is told"
            problems.add("Trainer", what, "give it another name")
        problems.raise_if_any()
        data = data_of(dataset, "dataset")
        batch_size = batch_size or data.batch_size
        if batch_size is None:
            raise InputError(Problem("Trainer", "needs a batch_size", "give that of all GPUs"))
        if data.drop_last and _count(data.dataset) < batch_size:
            what = f"has {_count(data.dataset)} samples, which drop_last leaves out of batches"
            cure = f"give at least {batch_size}, or a smaller batch_size"
            raise InputError(Problem("dataset", f"{what} of {batch_size}", cure))
        if steps is None:
            assert epochs is not None, "checked before"
            count = _count(data.dataset)
            whole = batch_size * (count // batch_size)
            steps = steps_of(epochs, whole if data.drop_last else count, batch_size)
        evaluated = None if eval_dataset is None else data_of(eval_dataset, "eval_dataset")
        if evaluated is not None:
            cure = "give a data set with len()"
            if _count(evaluated.dataset, "eval_dataset", cure) == 0:
                cure = "give at least one sample, or no data to evaluate"
                raise InputError(Problem("eval_dataset", "is empty", cure))
        self.recipe = Recipe(
            model=model,
            dataset=data.dataset,
            batch_size=batch_size,
            steps=steps,
            loss=loss,
            make_optimizer=_as_function(optimizer, torch.optim.Optimizer),
            make_scheduler=_as_function(scheduler, torch.optim.lr_scheduler.LRScheduler),
            collate=collate or data.collate or default_collate,
            call_module=call,
            eval_dataset=None if evaluated is None else evaluated.dataset,
            eval_collate=None if evaluated is None else evaluated.collate,
            eval_every=eval_every,
            more_metrics=metrics or {},
            loggers=tuple(loggers),
            callbacks=tuple(callbacks),
            precision=precision,
            recompute=recompute,
            clip_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            max_tp=max_tp,
            seed=seed,
            shuffled=data.shuffled if shuffle is None else shuffle,
            drop_last=data.drop_last,
            num_workers=data.num_workers,
            ignored=data.notes + (() if evaluated is None else evaluated.notes),
            name=name or Path(sys.argv[0]).stem or "job",
            is_alone=on_train is None,
        )
        self.history: list[StepReport] = []
        self.evaluations: dict[int, dict[str, float]] = {}
        """The metrics of each evaluation, by the step before it."""

    def train(self) -> None:
        """Train to the last step; the module then has the trained weights.

        After an exception, such as that of Ctrl-C, it has the weights of the last step.
        """
        if on_train is None:
            try:
                _refuse_several_processes()
                self._train_alone()
            except InputError as error:
                # Where in our code it was found says nothing to a user.
                raise InputError(error.problems) from None
        else:
            on_train(self.recipe)

    def _train_alone(self) -> None:
        recipe = self.recipe
        devices = _devices_of(recipe.model)
        recipe.switch_caches(on=False)
        try:
            self._train(recipe)
        finally:
            recipe.switch_caches(on=True)  # Otherwise the script would save a model without caches.
            if isinstance(recipe.model, nn.Module) and len(devices) == 1:
                recipe.model.to(devices.pop())

    def _train(self, recipe: Recipe) -> None:
        job = recipe.job()
        for note in recipe.changes():
            print(f"note: {note}", flush=True)
        assert job.steps is not None, "checked before"
        rank = RankTrainer(
            *(job, one_rank_plan(job), 0, SingleRankTransport(), recipe.data()),
            device="cuda" if torch.cuda.is_available() else "cpu",
            module=recipe,
        )
        try:
            self._train_all(rank, job.steps)
        except BaseException:
            # Of Ctrl-C, for example: the script may save what was trained so far.
            with suppress(Exception):
                self.recipe.refuse_changes()
                self._take_back(rank)
            raise
        rank.close()
        self._take_back(rank)

    def _train_all(self, rank: RankTrainer, steps: int) -> None:
        with ProgressDisplay(steps, as_json=False) as display:
            while rank.progress.step < steps:
                report = rank.step()
                self.history.append(report)
                display.step(report.line())
                rank.log(report)
                found = rank.evaluate_if_due()
                if found is not None:
                    self.evaluations[report.step] = found
                    display.evaluation(report.step, found)
        rank.end_log()

    def _take_back(self, rank: RankTrainer) -> None:
        """Give the script's module the weights of the last step, unless an update was cut off."""
        if rank.update_complete:
            tensors = rank_tensors(rank.buffers.values())
            self.recipe.take_back(merge_ranks([tensors], tensors_of(rank.job)))


def _refuse_several_processes() -> None:
    """Refuse to be one of the processes of torchrun, each of which would train the whole job."""
    count = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and count.isdecimal() and int(count) > 1:
        what = f"is called in one of {count} processes, each of which would train the whole job"
        cure = "start python alone; `sailorctl submit` and `python -m worker run` use many GPUs"
        raise InputError(Problem("train()", what, cure))


def _devices_of(model: nn.Module | Callable[[], nn.Module]) -> set[torch.device]:
    """Return where a script has the tensors of its module."""
    if not isinstance(model, nn.Module):
        return set()
    return {each.device for each in (*model.parameters(), *model.buffers())}


def steps_of(epochs: float, samples: int, batch_size: int) -> int:
    """Return the number of whole batches in these epochs, rounded up."""
    # 1.1 * 100 / 10 is 11.000000000000002, whose fraction is no batch.
    return max(1, math.ceil(round(epochs * samples / batch_size, 6)))


def _check_counts(counts: Mapping[str, tuple[Any, int]], problems: Problems) -> None:
    """Check arguments that are whole numbers, each against the least that it may be."""
    for argument, (count, least) in counts.items():
        if count is not None and not _is_whole(count, least):
            cure = f"give a whole number of at least {least}"
            problems.add("Trainer", f"has {argument}={count!r}", cure)


def _check_word(argument: str, value: Any, known: Sequence[str], problems: Problems) -> None:
    if value not in known:
        cure = f"give one of {', '.join(known)}"
        problems.add("Trainer", f"has {argument}={value!r}", cure)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and least <= int(value) < 2**63


def _is_above_0(value: Any) -> bool:
    return isinstance(value, Real) and float(value) > 0


def _count(dataset: Dataset, place: str = "dataset", cure: str = "give steps") -> int:
    """Return the number of samples of an epoch."""
    if isinstance(dataset, Blend | Stream):
        what = f"is a {type(dataset).__name__}, which has no epochs"
        raise InputError(Problem(place, what, cure))
    return len(dataset)


def _as_function(given: Any, kind: type) -> Any:
    """Return a function that makes it: the given one, or one that returns the given object."""
    return (lambda _: given) if isinstance(given, kind) else given
