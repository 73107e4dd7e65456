"""Other models of transformers: each trains as a plain loop does, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from simulator.documents.problems import InputError
from tests.conftest import the_first_quick
from tests.worker.hf_families import VOCABULARY, all_in_fp64, images, sentences
from tests.worker.module_runs import assert_close, plain_loop, recipe_of, trained
from tests.worker.training_runs import alone, plan_of

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 32}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DRY_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DRY_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_embd": 16, "n_layer": 3, "n_head": 4, **DRY_GPT}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    # A block's second tensor, which nothing is computed from.
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 3, "n_head": 4, **DRY}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 16, "num_layers": 4, "num_heads": 4, "window_size": 4}
        | {"attention_types": [[["global", "local"], 2]], "attention_dropout": 0.0}
        | {"resid_dropout": 0.0, "embed_dropout": 0.0},
    ),
    # Tied weights, of which the head's name comes first.
    "camembert": ("CamembertForCausalLM", {**WIDE, **DRY_BERT, "is_decoder": True}),
    # Parameters between what TP splits, which its plan does not name.
    "apertus": ("ApertusForCausalLM", {**WIDE, "num_key_value_heads": 2}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    "cohere2": ("Cohere2ForCausalLM", {**WIDE, "num_key_value_heads": 2, "sliding_window": 4}),
    "falcon": ("FalconForCausalLM", {**SIZES, **DRY}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**WIDE, "num_key_value_heads": 2, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
}
PATCHES = {"image_size": 16, "patch_size": 8, "num_labels": 5}
FLAT = {**SIZES, **PATCHES, "mlp_ratio": 2}
WINDOWS = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
WINDOWS |= {"image_size": 16, "patch_size": 2, "num_labels": 5, "drop_path_rate": 0.0}
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("BeitForImageClassification", {**WIDE, **PATCHES, "drop_path_rate": 0.0}),
    "deit": ("DeiTForImageClassification", {**WIDE, **PATCHES, **DRY_BERT}),
    "data2vec": ("Data2VecVisionForImageClassification", {**WIDE, **PATCHES, "drop_path_rate": 0}),
    "dinov2": ("Dinov2ForImageClassification", {**FLAT, **DRY_BERT}),
    "ijepa": ("IJepaForImageClassification", {**WIDE, **PATCHES, **DRY_BERT}),
    "siglip": ("SiglipForImageClassification", {"vision_config": {**WIDE, **PATCHES}}),
    "clip": ("CLIPForImageClassification", {"vision_config": {**WIDE, **PATCHES}}),
    "vit_msn": ("ViTMSNForImageClassification", {**WIDE, **PATCHES, **DRY_BERT}),
    "swin": ("SwinForImageClassification", {**WINDOWS, **DRY_BERT}),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 2}
        | {"num_labels": 5},
    ),
}


def made(name: str, settings: dict[str, Any]) -> Any:
    """Return a tiny model in fp64, with random weights."""
    kind = getattr(transformers, name)
    nested = (
        {"text_config": {**WIDE, "vocab_size": VOCABULARY}} if "vision_config" in settings else {}
    )
    config = kind.config_class(**{**settings, **nested, "num_labels": 5})
    torch.manual_seed(0)
    return kind._from_config(config).double()


def assert_trains(name: str, settings: dict[str, Any], dataset: Any) -> None:
    """Train alone, in three stages, and as widely split as blocks may be."""
    with all_in_fp64():
        recipe = recipe_of(
            lambda: made(name, settings),
            dataset=dataset,
            make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )
        job = recipe.job()
        wanted = plain_loop(recipe, made(name, settings).train())
        count = len(job.model.layers)
        stages = [(0, 1, 1), (1, max(count - 2, 2), 1), (max(count - 2, 2), count, 1)]
        plans = [alone(job), plan_of(2, (4, stages))]
        if job.max_tp > 1:
            plans.append(plan_of(4, (2, [(0, count, job.max_tp)])))
        for plan in plans:
            assert_close(trained(recipe, job, plan), wanted, str(plan))
        batch = recipe.data().batch(0, range(8)).inputs
        theirs = made(name, settings).train()(**batch).loss.item()
        assert wanted.losses[0] == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize("family", the_first_quick(TEXTS, quick=1))
def test_a_language_model_trains_as_a_plain_loop_does(family):
    name, settings = TEXTS[family]
    assert_trains(name, {**settings, **ENDS}, sentences())


@pytest.mark.parametrize("family", the_first_quick(IMAGES, quick=1))
def test_an_image_model_trains_as_a_plain_loop_does(family):
    assert_trains(*IMAGES[family], images())


def test_parameters_between_split_parts_do_not_keep_blocks_whole():
    assert (
        recipe_of(lambda: made("ApertusForCausalLM", {**TEXTS["apertus"][1], **ENDS})).splits.max_tp
        == 2
    )


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        (
            "BartForCausalLM",
            {"d_model": 16, "decoder_layers": 2, "decoder_ffn_dim": 32, "is_decoder": True}
            | {"decoder_attention_heads": 4, "dropout": 0.0, "max_position_embeddings": 64},
            r"loss: is 3\.\d+ of the first sample by default, and the model itself computes 3\.\d+",
        ),
        (
            "CpmAntForCausalLM",
            {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "dim_head": 4}
            | {"dim_ff": 32},
            "takes a second tensor that is trained",
        ),
        (
            "RoFormerForCausalLM",
            {**WIDE, **DRY_BERT, "is_decoder": True, "embedding_size": 16},
            "uses what layer 0 computes beside the hidden state",
        ),
    ],
)
def test_what_cannot_train_alike_is_refused(name, settings, reason):
    recipe = recipe_of(lambda: made(name, {**settings, **ENDS}).float())
    with pytest.raises(InputError, match=reason):
        recipe.job()


def test_batch_norm_is_refused_by_its_name():
    """A pass over one image would fail first, and say less."""
    settings = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
    recipe = recipe_of(lambda: made("ResNetForImageClassification", settings), dataset=images())
    with pytest.raises(
        InputError, match=r"normalization is a BatchNorm2d, which mixes the samples"
    ):
        recipe.job()
