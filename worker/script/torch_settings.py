"""Reads the settings of torch's optimizers and schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Optimizer, ParameterGroup, UpdateSettings

_NAMES: dict[type, Optimizer] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
}
_UNSUPPORTED = ("amsgrad", "maximize", "dampening", "differentiable")


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer: its constants, learning rates and groups."""

    optimizer: Optimizer = "adamw"
    learning_rate: float = 3e-4
    update: UpdateSettings = field(default_factory=UpdateSettings)
    schedules: tuple[tuple[float, ...], ...] = ()
    """The scheduler's factors of each step, of groups that differ in them; none: always 1."""
    groups: Mapping[int, ParameterGroup] | None = None
    """The group of each parameter, by its ``id``; others are frozen. ``None``: all are trained."""


def default_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a script that names none."""
    trained = [each for each in module.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-4)


def settings_of(
    optimizer: torch.optim.Optimizer, scheduler: Any, *, steps: int
) -> OptimizerSettings:
    """Read the settings of an optimizer, and of a scheduler that drives it."""
    name = _NAMES.get(type(optimizer))
    if name is None:
        known = ", ".join(f"torch.optim.{each.__name__}" for each in _NAMES)
        what = f"is a {type(optimizer).__name__}, which ranks would not compute bit-equally"
        raise InputError(Problem("optimizer", what, f"use one of {known}"))
    _refuse_what_is_not_read(optimizer)
    first, *others = optimizer.param_groups
    if name == "adam" and first.get("decoupled_weight_decay"):
        name = "adamw"  # What AdamW is.
    rate = _rate(first)
    if rate <= 0:
        raise InputError(
            Problem("optimizer", f"has a learning rate of {rate:g}", "give one above 0")
        )
    for group in optimizer.param_groups:
        used = [key for key in _UNSUPPORTED if group.get(key)]
        if used:
            raise InputError(Problem("optimizer", f"sets {used[0]}", "leave it out"))
    for group in others:
        for key in ("betas", "eps", "momentum", "nesterov", "decoupled_weight_decay"):
            if group.get(key) != first.get(key):
                what = f"has groups with different {key}"
                raise InputError(Problem("optimizer", what, "give all groups the same"))
    update = UpdateSettings(
        betas=tuple(first.get("betas", (0.9, 0.999))),
        epsilon=first.get("eps", 1e-8),
        weight_decay=first["weight_decay"],
        momentum=first.get("momentum", 0.9),
        nesterov=first.get("nesterov", False),
    )
    schedules, numbers = _schedules(optimizer, scheduler, steps)
    groups = {
        id(parameter): ParameterGroup(_rate(group) / rate, group["weight_decay"], number)
        for group, number in zip(optimizer.param_groups, numbers, strict=True)
        for parameter in group["params"]
    }
    return OptimizerSettings(name, rate, update, schedules, groups)


def _refuse_what_is_not_read(optimizer: torch.optim.Optimizer) -> None:
    """Refuse moments of earlier steps, and hooks: ranks make optimizers of their own."""
    if optimizer.state:
        what = "has the state of steps before, which would be dropped"
        cure = "import the checkpoint that it came from: sailorctl checkpoint import --form dcp"
        raise InputError(Problem("optimizer", what, f"leave it out, and {cure}"))
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        what = "has hooks of its steps, which no rank calls"
        cure = "use callbacks of sailor.Trainer, or the model's forward pass"
        raise InputError(Problem("optimizer", what, cure))


def refuse_hooks(trained: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse hooks on parameters, by name: ranks train copies, which have none."""
    for name, parameter in trained.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            what = f"{name} has a hook on its gradient, which no rank calls"
            cure = "change the loss or the optimizer's groups instead, or freeze what is masked"
            raise InputError(Problem("model", what, cure))


def _rate(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _constants(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [
        tuple(group.get(key) for key in ("betas", "eps", "weight_decay", "momentum"))
        for group in optimizer.param_groups
    ]


def _schedules(
    optimizer: torch.optim.Optimizer, scheduler: Any, steps: int
) -> tuple[tuple[tuple[float, ...], ...], list[int]]:
    """Play a scheduler without training.

    Return its factors at each step, once for groups that do not differ in them, and which of these
    each group follows.
    """
    groups = optimizer.param_groups
    if scheduler is None:
        return (), [0] * len(groups)
    if getattr(scheduler, "optimizer", None) is not optimizer or isinstance(
        scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    ):
        what = "is not a schedule of this optimizer's learning rates by steps"
        cure = (
            "give one of torch.optim.lr_scheduler made for it; ReduceLROnPlateau is not supported"
        )
        raise InputError(Problem("scheduler", what, cure))
    constants = _constants(optimizer)
    before, rates = scheduler.state_dict(), [group["lr"] for group in groups]
    found: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is stepped without its optimizer, on purpose.
        for _ in range(steps):
            for group, factors in zip(groups, found, strict=True):
                # A group of rate 0 stays at 0 under any factor: it follows the first one's.
                factors.append(group["lr"] / _rate(group) if _rate(group) else found[0][-1])
            scheduler.step()
            if _constants(optimizer) != constants:
                what = "changes more than learning rates"
                raise InputError(
                    Problem("scheduler", what, "switch that off: cycle_momentum=False")
                )
    scheduler.load_state_dict(before)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    schedules: list[list[float]] = []
    for factors in found:
        if not any(_are_equal(factors, each) for each in schedules):
            schedules.append(factors)
    numbers = [
        next(n for n, each in enumerate(schedules) if _are_equal(factors, each))
        for factors in found
    ]
    return tuple(map(tuple, schedules)), numbers


def _are_equal(some: list[float], others: list[float]) -> bool:
    """Return whether factors are equal but for the rounding of a group's learning rates."""
    return all(abs(one - other) <= 1e-9 for one, other in zip(some, others, strict=True))
