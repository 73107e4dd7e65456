"""The error for a config.json that cannot be described says what to do instead."""

from __future__ import annotations

import pytest

from simulator.documents.problems import InputError
from simulator.models.huggingface import model_from_config


@pytest.mark.parametrize(
    ("model_type", "key", "experts"),
    [
        ("mixtral", "num_local_experts", 8),
        ("qwen3_moe", "num_experts", 128),
        ("deepseek_v3", "n_routed_experts", 256),
    ],
)
def test_a_mixture_of_experts_is_named_and_sent_to_a_script(
    model_type: str, key: str, experts: int
) -> None:
    with pytest.raises(InputError) as raised:
        model_from_config({"model_type": model_type, key: experts})
    said = str(raised.value)
    assert f"a mixture of {experts} experts" in said
    assert "by a script" in said


def test_an_unknown_model_of_one_expert_is_no_mixture() -> None:
    with pytest.raises(InputError, match="is not known"):
        model_from_config({"model_type": "falcon", "num_experts": 1})


def test_an_absurd_number_of_layers_is_refused_before_they_are_built() -> None:
    sizes = {"n_embd": 8, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    with pytest.raises(InputError, match="n_layer: is 10000001; give an integer from 1 to 10,000"):
        model_from_config({"model_type": "gpt2", "n_layer": 10_000_001, **sizes})
