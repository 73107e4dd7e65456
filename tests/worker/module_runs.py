"""Training runs of users' modules under plans, and the plain loop of torch that they must equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.hf_families import sentences
from tests.worker.threads import ThreadTransport, run_as_threads
from worker.layout.tensor_table import tensors_of
from worker.script.losses import default_loss
from worker.script.recipe import Recipe
from worker.training.full_tensors import TensorKey, merge_ranks, rank_tensors
from worker.training.precision import FP64, NumberFormats
from worker.training.trainer import RankTrainer

STEPS = 3


class Training(NamedTuple):
    """What a run gave; gradients and their norm are those of the first step."""

    losses: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float | None = None


def recipe_of(model: Any, **changes: Any) -> Recipe:
    """Return a recipe of three steps with AdamW."""
    given = {
        "dataset": sentences(),
        "batch_size": 8,
        "steps": STEPS,
        "make_optimizer": lambda m: torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=1e-2
        ),
        **changes,
    }
    return Recipe(model=model, **given)


def trained(recipe: Recipe, job: Job, plan: Plan, precision: NumberFormats = FP64) -> Training:
    """Train under a plan with all ranks as threads."""

    def body(transport: ThreadTransport) -> Any:
        rank = RankTrainer(
            *(job, plan, transport.rank, transport, recipe.data()),
            module=recipe,
            precision=precision,
        )
        reports = [rank.step()]
        first = rank_tensors(rank.buffers.values())
        reports += [rank.step() for _ in range(STEPS - 1)]
        return reports, first, rank_tensors(rank.buffers.values())

    ranks = run_as_threads(plan.device_count, body)
    reports = ranks[0][0]
    begun, ended = (
        merge_ranks([rank[number] for rank in ranks], tensors_of(job)) for number in (1, 2)
    )
    # Sums are divided by the samples of a batch first, and by the labels after the vote.
    scale = job.global_batch * job.sequence / reports[0].label_tokens
    gradients = _of_kind(recipe, begun, "gradient")
    return Training(
        [report.loss for report in reports],
        _of_kind(recipe, ended, "master"),
        {name: gradient * scale for name, gradient in gradients.items()},
        reports[0].grad_norm,
    )


def _of_kind(recipe: Recipe, state: dict[TensorKey, Tensor], kind: str) -> dict[str, Tensor]:
    return {
        recipe.cut.full_name(max(layer, 0), name): tensor
        for (layer, name, each), tensor in state.items()
        if each == kind
    }


def plain_loop(recipe: Recipe, module: nn.Module, scheduler: Any = None) -> Training:
    """Train as a script without sailor would, on whole batches."""
    assert recipe.make_optimizer is not None
    optimizer = recipe.make_optimizer(module)
    schedule = None if scheduler is None else scheduler(optimizer)
    found = Training([], {}, {})
    for step in range(STEPS):
        batch = recipe.data().batch(step, range(8)).inputs
        total, count = default_loss(module)(recipe.call(module, batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        if step == 0:
            found = found._replace(gradients=gradients_of(module), norm=_norm(module))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        found.losses.append((total / count).item())
    return found._replace(weights={name: p.detach() for name, p in module.named_parameters()})


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each parameter's gradient by name."""
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def _norm(module: nn.Module) -> float:
    return float(torch.stack([g.norm() for g in gradients_of(module).values()]).norm())


def assert_close(found: Training, wanted: Training, where: str, rel: float = 1e-10) -> None:
    """Compare losses, weights, and the gradients of the first step.

    AdamW hardly notices the scale of a gradient, so that weights alone would not show it.
    """
    assert found.losses == pytest.approx(wanted.losses, rel=rel), where
    for name, weight in found.weights.items():
        assert torch.allclose(weight, wanted.weights[name], rtol=rel, atol=rel / 10), (
            f"{where}: {name}"
        )
    assert found.norm == pytest.approx(wanted.norm, rel=rel), where
    assert found.norm is not None
    for name, gradient in found.gradients.items():
        expected = wanted.gradients[name]
        # Some are zero but for rounding, such as those of a bias of keys.
        size = max(float(expected.norm()), 1e-4 * found.norm)
        assert float((gradient - expected).norm()) <= rel * size, f"{where}: gradient of {name}"
