"""The ``Trainer`` of ``import sailor``: what a script gives, and training it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from simulator.documents.problems import InputError, Problem
from simulator.models.layers import Precision
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.data.map_dataset import Collate, MapDataset, default_collate
from worker.distributed.single_rank import SingleRankTransport
from worker.reporting.progress_display import ProgressDisplay
from worker.script.recipe import Loss, Recipe
from worker.training.trainer import RankTrainer, StepReport

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
        dataset: MapDataset,
        *,
        batch_size: int,
        loss: Loss | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | MakeScheduler | None = None,
        collate: Collate = default_collate,
        call: Callable[[nn.Module, Any], Any] | None = None,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "job",
    ) -> None:
        if (steps is None) == (epochs is None):
            raise InputError(Problem("Trainer", "needs steps or epochs", "give one of the two"))
        if steps is None:
            assert epochs is not None
            steps = math.ceil(epochs * len(dataset) / batch_size)
        self.recipe = Recipe(
            model=model,
            dataset=dataset,
            batch_size=batch_size,
            loss=loss,
            call_module=call,
            collate=collate,
            steps=steps,
            make_optimizer=_as_function(optimizer, torch.optim.Optimizer),
            make_scheduler=_as_function(scheduler, torch.optim.lr_scheduler.LRScheduler),
            clip_norm=clip_norm,
            precision=precision,
            seed=seed,
            shuffled=shuffle,
            name=name,
        )
        self.history: list[StepReport] = []
        self._rank: RankTrainer | None = None

    def train(self) -> None:
        """Train to the last step."""
        if on_train is None:
            self._train_alone()
        else:
            on_train(self.recipe)

    def _train_alone(self) -> None:
        recipe = self.recipe
        job = recipe.job()
        steps = job.steps
        assert steps is not None
        stage = Stage((0, len(job.model.layers)), 1, (Place("any", "this", "here"),))
        plan = Plan(recipe.batch_size, (Pipeline(1, (stage,)),))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rank = RankTrainer(
            job, plan, 0, SingleRankTransport(), recipe.data(), device=device, module=recipe
        )
        self._rank = rank
        with ProgressDisplay(steps, as_json=False) as display:
            while rank.progress.step < steps:
                report = rank.step()
                self.history.append(report)
                line = asdict(report)
                display.step(line)


def _as_function(given: Any, kind: type) -> Any:
    """Return a function that makes it: the given one, or one that returns the given object."""
    return (lambda _: given) if isinstance(given, kind) else given
