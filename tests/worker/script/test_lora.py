"""Adapters of peft train under any plan as a plain loop of torch trains them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")
pytest.importorskip("transformers", reason="their models are adapted")
peft = pytest.importorskip("peft", reason="its adapters are trained")

from tests.conftest import the_first_quick
from tests.worker.hf_families import all_in_fp64, language_model, sentences
from tests.worker.module_runs import assert_close, plain_loop, recipe_of, trained
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import alone, drawn
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # Of peft.
]

KINDS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "and a head": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "all": {"target_modules": "all-linear", "use_rslora": True},
}


def adapted(kind: str) -> torch.nn.Module:
    """Return a model whose adapters already have an effect."""
    config = peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **KINDS[kind])
    model = peft.get_peft_model(language_model("llama"), config).double()
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
        wanted = plain_loop(recipe, adapted(kind))
        for seed in range(3):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            found = trained(recipe, job, plan)
            assert_close(found, wanted, f"seed {seed}: {plan}")
            assert set(found.gradients) == set(wanted.gradients)
            assert all("lora_" in name or "modules_to_save" in name for name in found.weights)


def test_the_reason_against_tensor_parallelism_is_the_true_one():
    recipe = recipe_of(lambda: adapted("attention"))
    assert recipe.splits.max_tp == 1
    assert recipe.splits.why_not_more == (
        "base_model.model.model.layers.0.self_attn.q_proj is a peft.tuners.lora.layer.Linear, "
        "not a plain nn.Linear"
    )


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
