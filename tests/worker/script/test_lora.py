"""Adapters of peft train under any plan as a plain loop of torch trains them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch

from simulator.documents.problems import InputError
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.conftest import the_first_quick
from tests.worker.hf_families import all_in_fp64, language_model, sentences
from tests.worker.module_runs import assert_close, plain_loop, recipe_of, trained
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import alone, drawn, plan_of
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.models.user_module.module_splits import _is_plain_lora
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer

# Of peft.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

KINDS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "and a head": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "all": {"target_modules": "all-linear", "use_rslora": True},
}


def adapted(kind: str, *, groups: int = 2, **changes: Any) -> torch.nn.Module:
    """Return a model whose adapters already have an effect."""
    settings = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **KINDS[kind], **changes}
    config = peft.LoraConfig(**settings)
    model = peft.get_peft_model(
        language_model("llama", num_key_value_heads=groups), config
    ).double()
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.normal_(0, 0.1, generator=draw)
    return model.train()


@pytest.mark.parametrize("kind", the_first_quick(KINDS, quick=1))
def test_adapters_train_under_any_plan_as_in_a_plain_loop(kind):
    with all_in_fp64():
        recipe = recipe_of(lambda: adapted(kind))
        job = recipe.job()
        assert job.max_tp > 1, recipe.splits.why_not_more
        wanted = plain_loop(recipe, adapted(kind))
        for seed in range(6):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            found = trained(recipe, job, plan)
            assert_close(found, wanted, f"seed {seed}: {plan}")
            assert set(found.gradients) == set(wanted.gradients)
            assert all("lora_" in name or "modules_to_save" in name for name in found.weights)


@pytest.mark.slow
def test_adapters_that_four_ranks_split_train_as_in_a_plain_loop():
    with all_in_fp64():
        recipe = recipe_of(lambda: adapted("all", groups=4))
        job = recipe.job()
        assert job.max_tp == 4, recipe.splits.why_not_more
        plan = plan_of(job.global_batch, (1, [(0, len(job.model.layers), 4)]))
        wanted = plain_loop(recipe, adapted("all", groups=4))
        assert_close(trained(recipe, job, plan), wanted, "TP 4")


@pytest.mark.slow
def test_dropout_of_adapters_is_the_same_under_any_plan():
    with all_in_fp64():
        recipe = recipe_of(lambda: adapted("attention", lora_dropout=0.3))
        job = recipe.job()
        assert job.max_tp > 1, recipe.splits.why_not_more
        wanted = trained(recipe, job, alone(job))
        without = plain_loop(recipe_of(lambda: adapted("attention")), adapted("attention"))
        assert wanted.losses[0] != pytest.approx(without.losses[0], rel=1e-6)
        for seed in range(4):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


def test_matrices_follow_the_layer_that_they_adapt():
    recipe = recipe_of(lambda: adapted("all"))
    attention = "base_model.model.model.layers.0.self_attn"
    kinds = {path.removeprefix(f"{attention}."): kind for path, kind in recipe.splits.kinds.items()}
    for part, kind in {
        "q_proj.base_layer": "columns",
        "q_proj.lora_B.default": "adapter columns",
        "o_proj.base_layer": "rows",
        "o_proj.lora_A.default": "adapter rows",
    }.items():
        assert kinds[part] == kind, part
    assert not {"q_proj.lora_A.default", "o_proj.lora_B.default"}.intersection(kinds)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"use_dora": True},
            "base_model.model.model.layers.0.self_attn.q_proj is a peft.tuners.lora.layer.Linear, "
            "not a plain nn.Linear",
        ),
        (
            {"target_modules": "all-linear", "lora_dropout": 0.1},
            "base_model.model.model.layers.0 has dropout inside a part that would be split",
        ),
    ],
    ids=["dora", "dropout of split inputs"],
)
def test_other_adapters_say_why_they_are_not_split(changes, why):
    recipe = recipe_of(lambda: adapted("attention", **changes))
    assert (recipe.splits.max_tp, recipe.splits.why_not_more) == (1, why)


def test_adapters_of_a_peft_that_does_not_tell_their_variant_are_not_plain():
    part = adapted("attention").base_model.model.model.layers[0].self_attn.q_proj
    assert _is_plain_lora(part)
    del part.lora_variant
    assert not _is_plain_lora(part)


def test_node_whose_packages_split_less_than_the_plan_refuses_to_train():
    recipe = recipe_of(lambda: adapted("attention"))
    job = recipe.job()
    plan = next(p for p in plans_of(job) if any(s.tp > 1 for s in p.pipelines[0].stages))
    less = replace(recipe.splits, max_tp=1, why_not_more="its peft is older")
    vars(recipe)["splits"] = less
    with pytest.raises(InputError, match=r"split over \d ranks here: its peft is older"):
        trained(recipe, job, plan)


def plans_of(job: Job) -> Iterator[Plan]:
    """Yield random plans of a job."""
    return (any_plan(drawn(seed), job, ranks_max=5) for seed in itertools.count())


@pytest.mark.parametrize("parts", ["attention", "and a head"])
def test_saved_adapters_are_read_by_peft_to_the_same_logits(parts, tmp_path):
    recipe = recipe_of(lambda: adapted(parts))
    job = recipe.job()
    rank = RankTrainer(*(job, alone(job), 0, SingleRankTransport(), recipe.data()), module=recipe)
    for _ in range(2):
        rank.step()
    state = merge_ranks([rank_tensors(rank.buffers.values())], tensors_of(job))
    masters = {key[:2]: value for key, value in state.items() if key[2] == "master"}
    recipe.save(
        {(max(layer, 0), name): value for (layer, name), value in masters.items()}, tmp_path
    )
    recipe.take_back(state)
    read = peft.PeftModel.from_pretrained(language_model("llama"), tmp_path).double().eval()
    tokens = sentences(1)[0]["input_ids"][None]
    with torch.no_grad():
        mine, theirs = (each(input_ids=tokens).logits for each in (recipe._module.eval(), read))
        untrained = adapted(parts).eval()(input_ids=tokens).logits
    assert torch.equal(mine, theirs)
    assert not torch.allclose(mine, untrained, rtol=1e-3)
