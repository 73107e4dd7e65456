"""A config.json is written for a model only if our reader reads that model back from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.models.families import build_model
from simulator.models.huggingface_config import config_of

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 211, "sequence": 32}
FAMILIES = {
    "gpt2": {},
    "opt": {"ffn": 128},
    "llama": {"ffn": 96, "kv_heads": 2},
    "gpt-neo": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_has_a_config_that_is_read_as_that_model(family):
    model = build_model(family, name="mine", place="model", **SIZES, **FAMILIES[family])
    config = config_of(model, "float32")
    assert config is not None
    assert (config["vocab_size"], config["dtype"]) == (211, "float32")


def test_no_config_is_written_that_would_describe_another_model():
    model = build_model("llama", name="mine", place="model", **SIZES, ffn=96)
    odd = replace(model, architecture=replace(model.architecture, embedding_width=48))
    assert config_of(odd, "float32") is None
    assert config_of(replace(model, architecture=None), "float32") is None
