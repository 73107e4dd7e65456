"""Models: published sizes, costs under different training settings, and invalid input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents.problems import InputError
from simulator.models.architecture import Rotary
from simulator.models.description_file import describe, model_from_description
from simulator.models.families import FAMILIES, build_model
from simulator.models.huggingface import model_from_config
from simulator.models.layers import PRECISIONS, Model, divisors
from simulator.models.presets import PRESETS, preset
from simulator.models.transformer_block import MEGATRON, Kernels
from simulator.spec.job import Job

# As counted from the released weights, a shared embedding once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
}


def problems_of(run: Callable[[], object]) -> list[str]:
    with pytest.raises(InputError) as caught:
        run()
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_preset_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert preset(name).parameters == parameters


def test_layers_are_embedding_blocks_and_head() -> None:
    kinds = [layer.kind for layer in preset("opt-350m").layers]
    assert kinds == ["embedding", *["block"] * 24, "head"]


def test_a_shared_embedding_counts_once_in_a_stage_and_in_each_of_two() -> None:
    model = preset("gpt2")
    table = 50257 * 768
    first, second = model.stage_parameters(0, 7), model.stage_parameters(7, 14)
    assert first + second == model.parameters + table


@pytest.mark.parametrize("name", PRESETS)
def test_tp_ranks_together_hold_every_parameter(name: str) -> None:
    model = preset(name, pad_vocab_to=1 if name.startswith("vit") else 8)
    for tp in (1, 2, 4, 8):
        if model.problems_with_tp(tp):
            continue
        for layer in (model.layers[0], model.layers[1], model.layers[-1]):
            whole = sum(t.elements * (1 if t.split_dim is not None else tp) for t in layer.tensors)
            assert tp * layer.parameters(tp) == whole


def test_key_value_heads_are_replicated_beyond_their_number() -> None:
    block = preset("llama-3-8b").layers[1]
    keys = 2 * 8 * 128 * 4096
    assert 16 * block.parameters(16) == 16 * block.parameters(8) // 2 + 8 * keys // 8 + 8 * 2 * 4096


def test_flops_are_six_per_parameter_and_token_and_the_scores() -> None:
    block = preset("opt-30b").layers[1]
    matrices = 12 * 7168**2
    flops = block.forward_flops(micro_batch=2, sequence=2048)
    assert flops == 2 * 2048 * (2 * matrices + 4 * 2048 * 7168)
    assert block.forward_flops(micro_batch=2, sequence=2048, tp=4) == flops / 4


@given(
    name=st.sampled_from(PRESETS),
    micro_batch=st.integers(1, 16),
    sequence=st.integers(1, 4096),
    precision=st.sampled_from(PRECISIONS),
    flash=st.booleans(),
)
def test_more_work_is_never_cheaper_and_recomputation_only_moves_memory(
    name: str, micro_batch: int, sequence: int, precision: Any, flash: bool
) -> None:
    model = preset(name)
    for layer in (model.layers[0], model.layers[1], model.layers[-1]):
        use = {"sequence": sequence, "precision": precision, "flash": flash}
        one = layer.kept_bytes(micro_batch=micro_batch, **use)
        assert layer.kept_bytes(micro_batch=micro_batch + 1, **use) > one
        assert layer.kept_bytes(micro_batch=micro_batch, tp=2, **use) <= one
        assert layer.workspace_bytes(micro_batch=micro_batch, **use) >= 0
        full = {"recompute": "full", **use}
        kept = layer.kept_bytes(micro_batch=micro_batch, **full)
        moved = layer.workspace_bytes(micro_batch=micro_batch, **full)
        assert kept <= one
        assert kept + moved == pytest.approx(
            one + layer.workspace_bytes(micro_batch=micro_batch, **use)
        )
        assert layer.memory_traffic_bytes(micro_batch=micro_batch, **use) > 0


def test_tensor_parallel_all_reduces_per_layer() -> None:
    for name, width in (("gpt2", 768), ("opt-350m", 512)):
        model = preset(name)
        first, block, last = model.layers[0], model.layers[1], model.layers[-1]
        meetings = [(x.allreduces_forward, x.allreduces_backward) for x in (first, block, last)]
        assert meetings == [(1, 0), (2, 2), (0, 1)]
        assert block.allreduce_elements(micro_batch=2, sequence=10) == 20 * model.hidden
        assert first.allreduce_elements(micro_batch=2, sequence=10) == 20 * width
    ends = (preset("vit-b").layers[0], preset("vit-b").layers[-1])
    assert all(x.allreduces_forward == x.allreduces_backward == 0 for x in ends)


def test_flash_attention_keeps_and_moves_no_score_matrix() -> None:
    block = preset("gpt2").layers[1]
    use: dict[str, Any] = {"micro_batch": 1, "sequence": 1024, "precision": "bf16"}
    scores = 2 * 12 * 1024**2
    statistics = 4 * 12 * 1024
    assert block.kept_bytes(**use) - block.kept_bytes(**use, flash=True) == scores - statistics
    assert block.memory_traffic_bytes(**use) - block.memory_traffic_bytes(**use, flash=True) == (
        8 * scores
    )


def test_full_recomputation_keeps_a_blocks_input_alone() -> None:
    block = preset("opt-350m").layers[1]
    kept = block.kept_bytes(micro_batch=3, sequence=2048, precision="bf16", recompute="full")
    assert kept == 3 * 2048 * 1024 * 2


def test_memory_efficient_norms_keep_two_hidden_states_less() -> None:
    use: dict[str, Any] = {"micro_batch": 1, "sequence": 128, "precision": "fp32"}
    plain, lean = (preset("opt-1.3b", kernels=k).layers[1] for k in (Kernels(), MEGATRON))
    states, statistics = 2 * 2048, 2
    assert plain.kept_bytes(**use) - lean.kept_bytes(**use) == 4 * 128 * (states + statistics)


def test_tp_that_does_not_divide_is_reported_with_possible_degrees() -> None:
    model = preset("gpt2-xl")
    assert [str(p) for p in model.problems_with_tp(4)] == [
        "tp: TP 4 does not divide the 25 attention heads of gpt2-xl; choose from 1, 5, 25"
    ]
    assert model.problems_with_tp(5) == ()
    assert preset("llama-3-8b").problems_with_tp(16) == ()
    grouped = build_model("llama", layers=1, hidden=96, heads=12, kv_heads=4, ffn=96)
    (problem,) = grouped.problems_with_tp(6)
    assert "neither divides the 4 key/value heads" in problem.what
    for wrong in (0, -1, True, 2.0):
        assert model.problems_with_tp(wrong)  # type: ignore[arg-type]  # a user's slip


def test_sequence_beyond_learned_positions_is_reported() -> None:
    assert "1024" in preset("gpt2").problems_with_sequence(2048)[0].what
    assert preset("gpt2", sequence=2048).problems_with_sequence(2048) == ()
    assert preset("llama-2-7b").problems_with_sequence(32768) == ()


def test_unknown_names_get_a_suggestion() -> None:
    assert problems_of(lambda: preset("opt-305m")) == [
        'model.preset: there is no model preset "opt-305m"; did you mean "opt-350m" or '
        '"opt-30b" or "opt-125m"?'
    ]
    assert 'did you mean "llama"?' in problems_of(lambda: build_model("lama"))[0]


def test_all_invalid_numbers_are_reported_at_once() -> None:
    found = problems_of(
        lambda: build_model(
            "gpt2",
            layers=-3,
            hidden=math.nan,
            heads=True,
            ffn="3072",
            vocab=10**9,
            tied=1,
            activation="gelo",
            hiden=768,
            pad_vocab_to=0,
        )
    )
    places = [problem.split(":")[0].removeprefix("model.") for problem in found]
    assert places == [
        *("layers", "hidden", "heads", "ffn", "vocab", "tied", "activation", "hiden"),
        "pad_vocab_to",
    ]
    assert 'did you mean "hidden"' in found[7]
    assert problems_of(lambda: build_model("opt")) == [
        f"model.{key}: is missing; give a positive integer" for key in ("layers", "hidden", "heads")
    ]


def test_inconsistent_numbers_are_reported() -> None:
    found = problems_of(lambda: build_model("llama", layers=1, hidden=100, heads=12, kv_heads=5))
    assert [problem.split(":")[0] for problem in found] == ["model.heads", "model.kv_heads"]
    found = problems_of(lambda: build_model("vit", layers=1, hidden=8, heads=2, patch=15))
    assert found == [
        "model.patch: patches of 15 pixels do not divide an image of 224; give a divisor of image"
    ]


def test_a_vocabulary_is_padded_and_an_uneven_one_rounded_up() -> None:
    assert preset("gpt2", pad_vocab_to=128).vocab == 50304
    table = preset("gpt2").layers[0].tensors[0]
    assert table.rank_shape(4) == (12565, 768)


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_round_trips_exactly(name: str) -> None:
    model = preset(name, dropout=True)
    again = model_from_description(json.loads(json.dumps(describe(model))))
    assert again == model
    assert again.fingerprint == model.fingerprint


def test_different_models_have_different_fingerprints() -> None:
    models = [preset(name) for name in PRESETS] + [preset("gpt2", dropout=True)]
    assert len({model.fingerprint for model in models}) == len(models)


def described() -> dict[str, Any]:
    tiny = build_model("gpt2", layers=2, hidden=8, heads=2, vocab=10, sequence=4)
    return json.loads(json.dumps(describe(tiny)))  # type: ignore[no-any-return]  # JSON is untyped


def test_all_mistakes_in_a_description_are_reported_at_once() -> None:
    data = described()
    del data["hidden"]
    data["heads"] = math.nan
    data["tied"] = "yes"
    data["colour"] = "blue"
    data["layers"][1]["kind"] = "blok"
    data["layers"][1]["kept"][0]["per_token"] = -1
    data["layers"][2]["tensors"][0]["shape"] = [0]
    data["layers"][2]["moments"] = "none"
    places = {
        problem.split(":")[0] for problem in problems_of(lambda: model_from_description(data))
    }
    assert places == {
        *("hidden", "heads", "tied", "colour", "layers[1].kind", "layers[2].moments"),
        *("layers[1].kept[0].per_token", "layers[2].tensors[0].shape[0]"),
    }


def test_description_with_wrong_order_or_unknown_ties_is_reported() -> None:
    data = described()
    data["layers"] = data["layers"][1:]
    data["layers"][-1]["tensors"][-1]["tied_to"] = "block 1/token.weight"
    data["layers"][1]["name"] = "block 1"
    found = problems_of(lambda: model_from_description(data))
    assert [problem.split(":")[0] for problem in found] == [
        *("layers", "layers", "layers[2].tensors[2].tied_to")
    ]


def test_well_formed_but_meaningless_description_is_reported() -> None:
    data = described()
    data["heads"] = True
    data["ffn"] = 32.0
    found = problems_of(lambda: model_from_description(data))
    assert [problem.split(":")[0] for problem in found] == ["heads", "ffn"]
    data = described()
    data["layers"][1]["kept"] = []
    data["layers"][2]["moments"] = []
    data["layers"][1]["tensors"][0]["split_dim"] = 1
    data["layers"][-1]["tensors"][-1]["shape"] = [11, 8]
    found = problems_of(lambda: model_from_description(data))
    assert [problem.split(":")[0] for problem in found] == [
        *("layers[1].kept", "layers[2].moments", "layers[1].tensors[0].split_dim"),
        "layers[3].tensors[2].tied_to",
    ]


@pytest.mark.parametrize("data", [None, [], 3, "text", {}, {"format": "other"}])
def test_non_description_is_rejected(data: object) -> None:
    assert len(problems_of(lambda: model_from_description(data))) == 1


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
        **{"n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new"},
    },
    "gpt-neo-125m": {
        **{"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12},
        **{"intermediate_size": None, "max_position_embeddings": 2048, "vocab_size": 50257},
        **{"window_size": 256, "attention_types": [[["global", "local"], 6]]},
    },
    "opt-350m": {
        **{"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096},
        **{"num_attention_heads": 16, "vocab_size": 50272, "max_position_embeddings": 2048},
        **{"word_embed_proj_dim": 512, "do_layer_norm_before": False, "enable_bias": True},
        **{"activation_function": "relu", "_remove_final_layer_norm": False},
    },
    "llama-3-8b": {
        **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
        **{"vocab_size": 128256, "max_position_embeddings": 8192, "hidden_act": "silu"},
        **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None},
    },
    "vit-b": {
        **{"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "qkv_bias": True},
        **{"num_attention_heads": 12, "intermediate_size": 3072, "image_size": 224},
        **{"patch_size": 16, "num_channels": 3, "num_labels": 1000, "hidden_act": "gelu"},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_config_gives_the_preset(name: str) -> None:
    assert model_from_config(CONFIGS[name], name=name) == preset(name)


def test_labels_may_be_named_instead_of_counted() -> None:
    config = {**CONFIGS["vit-b"], "id2label": {str(i): "a" for i in range(10)}}
    del config["num_labels"]
    assert model_from_config(config).vocab == 10


def test_mistakes_in_a_config_are_reported_under_its_own_keys() -> None:
    config = {**CONFIGS["llama-3-8b"], "hidden_size": "4096", "num_hidden_layers": -1}
    config |= {"hidden_act": "relu6", "tie_word_embeddings": "no"}
    del config["vocab_size"], config["num_attention_heads"]
    found = problems_of(lambda: model_from_config(config))
    assert {problem.split(":")[0] for problem in found} == {
        *("hidden_size", "num_hidden_layers", "hidden_act", "tie_word_embeddings"),
        *("vocab_size", "num_attention_heads"),
    }
    galactica = {**CONFIGS["opt-350m"], "layer_norm_elementwise_affine": False}
    assert "not supported" in problems_of(lambda: model_from_config(galactica))[0]


def test_config_sets_the_architecture() -> None:
    def architecture_of(name: str, **changes: Any) -> Any:
        return model_from_config({**CONFIGS[name], **changes}).architecture

    long = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    scaled = architecture_of("llama-3-8b", rope_scaling=long)
    assert scaled.rotary == preset("llama-3.2-1b").architecture.rotary
    newer = {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2}}
    assert architecture_of("llama-3-8b", **newer).rotary == Rotary(7.0, 2.0)
    assert architecture_of("gpt2", activation_function="gelu").nonlinearity == "gelu"
    assert architecture_of("gpt2", layer_norm_epsilon=0.5).norm_epsilon == 0.5
    kinds = {"window_size": 9, "attention_types": [[["local"], 5], [["global"], 7]]}
    assert architecture_of("gpt-neo-125m", **kinds).windows == (9,) * 5 + (0,) * 7


def test_invalid_architecture_keys_are_reported() -> None:
    def places(name: str, **changes: Any) -> list[str]:
        found = problems_of(lambda: model_from_config({**CONFIGS[name], **changes}))
        return [problem.split(":")[0] for problem in found]

    yarn = {"rope_type": "yarn", "rope_theta": -1}
    assert places("llama-3-8b", rms_norm_eps=0, rope_scaling=yarn) == [
        *("rms_norm_eps", "rope_scaling.rope_theta", "rope_scaling.rope_type")
    ]
    assert places("llama-3-8b", rope_scaling=[]) == ["rope_scaling"]
    assert places("gpt-neo-125m", attention_types=[[["global"], 5]]) == ["attention_types"]
    nested = [[[["global"], {"local": 1}], 6]]
    assert places("gpt-neo-125m", attention_types=nested) == ["attention_types"]
    assert places("gpt2", scale_attn_by_inverse_layer_idx=True) == [
        "scale_attn_by_inverse_layer_idx"
    ]


def test_rotary_positions_need_an_even_head_width() -> None:
    found = problems_of(lambda: build_model("llama", layers=1, hidden=12, heads=4))
    assert [problem.split(":")[0] for problem in found] == ["model.heads"]


@pytest.mark.parametrize("config", [None, [], {}, {"model_type": 3}, {"model_type": "lama"}])
def test_unknown_config_is_rejected(config: object) -> None:
    assert len(problems_of(lambda: model_from_config(config))) == 1


# What ran in Megatron-DeepSpeed: OPT without dropout and with norms that keep their output,
# GPT-Neo in GPT-2's form (biased, GELU) with dropout of hidden states and ordinary norms.
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT-350": ("opt", {"kernels": MEGATRON}),
    "OPT-30": ("opt", {"kernels": MEGATRON}),
    "GPT-Neo-2.7": (
        "gpt2",
        {"dropout": True, "attention_dropout": False, "kernels": Kernels(loss="in_place")},
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_activations_match_measurements(reference: Path, name: str) -> None:
    profile = json.loads((reference / f"profiles_{name}.json").read_text())
    config, (family, more) = profile["config"], MEASURED[name]
    model = measured_model(family, config, more)
    sequence, hidden = config["seq_len"], config["hidden"]
    for key, sizes in profile["memory_per_layer"].items():
        tp = int(key.removeprefix("tp"))
        for index, layer in enumerate(model.layers):
            if layer.kind == "head" and not config["head_has_vocab_projection"]:
                continue
            kept = layer.kept_bytes(micro_batch=1, sequence=sequence, tp=tp, precision="fp32") / 4
            # The measurement is the difference of what stands allocated around a layer: with its
            # output, and without its input, which we count where autograd keeps it.
            counts_input = more["kernels"].norm == "input" and layer.kind != "embedding"
            standing = kept + sizes["act_output_floats"][index] - counts_input * sequence * hidden
            # The rest is the allocator's, which keeps up to 1 MiB of a block unsplit.
            assert standing == pytest.approx(sizes["act_mem_floats"][index], rel=0.014)
        blocks = [layer.parameters(tp) for layer in model.layers[1:-1]]
        assert blocks == sizes["params_floats"][1:-1]


def measured_model(family: str, config: dict[str, Any], more: dict[str, Any]) -> Model:
    return build_model(
        family,
        layers=config["transformer_layers"],
        hidden=config["hidden"],
        heads=config["heads"],
        ffn=config["ffn_hidden"],
        vocab=config["vocab_padded"],
        sequence=config["seq_len"],
        tied=False,
        **more,
    )


def test_every_family_has_a_preset() -> None:
    # Exact models are for tests of the runtime; there are no published counts.
    assert {*(preset(name).family for name in PRESETS), "exact"} == set(FAMILIES)


def test_sailors_dropout_switches_flash_attention_off() -> None:
    model = build_model("gpt2", layers=1, hidden=64, heads=4, vocab=64, sequence=64)
    job = Job("job", model, global_batch=8, sequence=64)
    # Megatron's kernels fuse attention with its dropout.
    for dropout, runtime, uses in (
        (0.0, "sailor", True),
        (0.1, "sailor", False),
        (0.1, "megatron-deepspeed", True),
    ):
        changed = replace(job, dropout=dropout, runtime=runtime)
        assert changed.uses_flash is uses
        assert not replace(changed, flash_attention=False).uses_flash


@pytest.mark.parametrize(("kernels", "drawn"), [(Kernels(), 76), (MEGATRON, 0)])
def test_drawing_a_dropout_is_traffic_unless_it_is_fused(kernels: Kernels, drawn: int) -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 64, "sequence": 64}
    dropping, plain = (
        build_model("gpt2", **sizes, dropout=dropout, kernels=kernels).layers[1]
        for dropout in (True, False)
    )
    use: dict[str, Any] = {"micro_batch": 2, "sequence": 64, "precision": "bf16"}
    scores, residuals = 2 * 4 * 64 * 64, 2 * 2 * 64 * 64
    more = dropping.memory_traffic_bytes(**use) - plain.memory_traffic_bytes(**use)
    assert more == drawn * (scores + residuals) + 2 * 2 * scores


@pytest.mark.parametrize("number", [*range(1, 300), 2**16, 4 * 2**16, 10**6 + 3])
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_a_degree_that_divides_a_vast_model_is_found_without_counting_to_its_size() -> None:
    model = build_model("gpt2", layers=1, hidden=64, heads=8, ffn=8 * 1_249_999, sequence=8)
    assert model.problems_with_tp(8) == ()
