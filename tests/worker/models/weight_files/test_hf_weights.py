"""Hugging Face's models and ours compute the same from the same config and file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import torch as safetensors

from simulator.documents.problems import InputError
from simulator.models.families import build_model
from simulator.models.huggingface import model_from_config
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.threads import run_as_threads
from worker.checkpoint.other_formats.convert import external_names
from worker.data.sources.open_data import open_data
from worker.models.apply_plan import build_layer, tie
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.models.weight_files.hf_weights import open_checkpoint
from worker.training.trainer import RankTrainer

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 37, "max_position_embeddings": 24}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONG = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, **ENDS}),
    "gpt2-unscaled": (
        "gpt2",
        {
            **{"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "n_inner": 40, **ENDS},
            **{"scale_attn_weights": False, "activation_function": "gelu"},
            **{"layer_norm_epsilon": 0.1, "tie_word_embeddings": False},
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            **{"hidden_size": 16, "num_layers": 4, "num_heads": 4, "window_size": 5, **TEXT},
            **{"attention_types": [[["global", "local"], 2]], **ENDS},
        },
    ),
    "opt": ("opt", {**SIZES, **TEXT, **ENDS, "ffn_dim": 40, "word_embed_proj_dim": 16}),
    "opt-350m": (
        "opt",
        {
            **{**SIZES, **TEXT, **ENDS, "ffn_dim": 40, "word_embed_proj_dim": 8},
            **{"do_layer_norm_before": False},
        },
    ),
    "opt-plain": (
        "opt",
        {
            **{**SIZES, **TEXT, **ENDS, "ffn_dim": 40, "word_embed_proj_dim": 16},
            **{"enable_bias": False, "tie_word_embeddings": False},
        },
    ),
    "llama": ("llama", {**SIZES, **TEXT, "intermediate_size": 40, **ENDS}),
    "llama-grouped": (
        "llama",
        {
            **{**SIZES, **TEXT, "intermediate_size": 40, **ENDS, "num_key_value_heads": 2},
            **{"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
            **{"head_dim": 6, "rms_norm_eps": 0.01},
            "rope_parameters": {
                **{**LONG, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
            },
        },
    ),
    "llama-linear": (
        "llama",
        {
            **{**SIZES, **TEXT, "intermediate_size": 40, **ENDS},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
        },
    ),
    "vit": (
        "vit",
        {**SIZES, "intermediate_size": 40, "image_size": 12, "patch_size": 4, "num_labels": 7},
    ),
    "vit-plain": (
        "vit",
        {
            **{**SIZES, "intermediate_size": 40, "image_size": 8, "patch_size": 2},
            **{"num_channels": 1, "num_labels": 3, "qkv_bias": False, "layer_norm_eps": 0.1},
        },
    ),
}


def theirs(name: str) -> Any:
    """Return Hugging Face's model in fp64 with random parameters, so that none can be confused."""
    model_type, numbers = CONFIGS[name]
    if "n_positions" in numbers:
        numbers = {**numbers, "vocab_size": 37}
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    kind = (
        transformers.AutoModelForImageClassification
        if model_type == "vit"
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, attn_implementation="eager").double().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=draw).mul_(0.3)
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def job_of(folder: Path, **training: Any) -> Job:
    config = json.loads((folder / "config.json").read_text())
    return Job(name="job", model=model_from_config(config), global_batch=2, sequence=20, **training)


def logits_of(job: Job, folder: Path, inputs: Any, tp: int = 1) -> Any:
    checkpoint = open_checkpoint(folder, job)

    def body(transport: Any) -> Any:
        group = transport.group(tuple(range(tp))) if tp > 1 else None
        layers = [
            build_layer(
                job,
                index,
                tp=tp,
                tp_index=transport.rank,
                group=group,
                context=MicroBatchContext(),
                dtype=torch.float64,
                device="cpu",
                values=checkpoint.values(index),
            )
            for index in range(len(job.model.layers))
        ]
        tie(layers)
        x = inputs
        for layer in layers:
            x = layer(x)
        return x, layers

    ranks = run_as_threads(tp, body)
    cut = ranks[0][1][-1].loss_group is not None
    whole = torch.cat([logits for logits, _ in ranks], -1) if cut else ranks[0][0]
    return whole[..., : job.model.vocab].detach()


def inputs_of(job: Job) -> Any:
    draw = torch.Generator().manual_seed(2)
    architecture = job.model.architecture
    assert architecture is not None
    if architecture.image:
        size = (2, architecture.channels, architecture.image, architecture.image)
        return torch.randn(size, generator=draw, dtype=torch.float64)
    return torch.randint(job.model.vocab, (2, 20), generator=draw)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_hugging_face(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    folder = saved(model, tmp_path)
    job = job_of(folder)
    inputs = inputs_of(job)
    with torch.no_grad():
        expected = model(inputs).logits
    torch.testing.assert_close(logits_of(job, folder, inputs), expected, rtol=1e-5, atol=1e-6)
    divided = job_of(folder, max_tp=2)
    many = logits_of(divided, folder, inputs, tp=2)
    torch.testing.assert_close(many, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoint_round_trips(name: str, tmp_path: Path) -> None:
    folder = saved(theirs(name), tmp_path)
    job = job_of(folder, max_tp=4 if "gpt2-un" not in name else 2)
    checkpoint = open_checkpoint(folder, job)
    tensors = {}
    for index in range(len(job.model.layers)):
        layer = build_layer(
            job,
            index,
            tp=1,
            tp_index=0,
            group=None,
            context=MicroBatchContext(),
            dtype=torch.float64,
            device="cpu",
            values=checkpoint.values(index),
        )
        tensors |= {(index, t.spec.name): t.parameter.detach() for t in layer.tensors}
    safetensors.save_file(
        external_names(job, tensors), tmp_path / "again.safetensors", {"format": "pt"}
    )
    before = safetensors.load_file(folder / "model.safetensors")
    after = safetensors.load_file(tmp_path / "again.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_sharded_checkpoint_is_read(tmp_path: Path) -> None:
    model = theirs("llama")
    one = saved(model, tmp_path / "one")
    many = saved(model, tmp_path / "many", max_shard_size="4KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    job = job_of(one)
    inputs = inputs_of(job)
    assert torch.equal(logits_of(job, one, inputs), logits_of(job, many, inputs))


def test_headless_checkpoint_with_buffers_is_read(tmp_path: Path) -> None:
    folder = saved(theirs("gpt2"), tmp_path)
    job = job_of(folder)
    inputs = inputs_of(job)
    expected = logits_of(job, folder, inputs)
    held = safetensors.load_file(folder / "model.safetensors")
    body = {key.removeprefix("transformer."): value for key, value in held.items()}
    body["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    safetensors.save_file(body, folder / "model.safetensors")
    assert torch.equal(logits_of(job, folder, inputs), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped", "vit"])
def test_any_plan_starts_from_the_checkpoints_weights(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    folder = saved(model, tmp_path)
    job = replace(job_of(folder, max_tp=2), precision="fp32", global_batch=4)
    if job.model.architecture.image:
        job = replace(job, sequence=job.model.sequence_max)
    data = open_data(job, tmp_path)
    samples = data.batch(0, range(4))
    with torch.no_grad():
        logits = model(samples.inputs.double() if name == "vit" else samples.inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), samples.labels.flatten())
    layers = len(job.model.layers)
    place = (Place("cpu", "this", "here"),)
    cut = Pipeline(1, (Stage((0, 2), 2, place), Stage((2, layers), 1, place)))
    plan = Plan(2, (cut, Pipeline(1, (Stage((0, layers), 1, place),))))
    checkpoint = open_checkpoint(folder, job)

    def body(transport: Any) -> float:
        weights = checkpoint.values
        trainer = RankTrainer(job, plan, transport.rank, transport, data, weights=weights)
        return trainer.step().loss

    losses = run_as_threads(4, body)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)


def problems_of(path: Path, job: Job) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path, job)
    return [str(problem) for problem in caught.value.problems]


def test_all_mismatches_are_reported_at_once(tmp_path: Path) -> None:
    folder = saved(theirs("llama"), tmp_path)
    job = job_of(folder)
    path = folder / "model.safetensors"
    held = safetensors.load_file(path)
    del held["model.layers.0.mlp.up_proj.weight"]
    held["model.layers.1.mlp.up_proj.weight"] = torch.zeros(41, 16)
    held["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)
    held["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 16)
    safetensors.save_file(held, path)
    assert problems_of(path, job) == [
        f"{path}: model.layers.0.mlp.up_proj.weight: is missing; use a checkpoint of this model",
        f"{path}: model.layers.1.mlp.up_proj.weight: has shape 41 x 16, the model's is 40 x 16; "
        "give the model's own numbers in the job, or its config.json",
        f"{path}: model.norm.weight: holds I8, not floating-point numbers; "
        "dequantise the checkpoint first",
        f"{path}: model.layers.2.mlp.up_proj.weight: is not a tensor of the model; "
        "use a checkpoint of exactly this model",
    ]


def test_tied_checkpoint_for_an_untied_model_suggests_the_cure(tmp_path: Path) -> None:
    folder = saved(theirs("gpt2"), tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": False}
    job = Job(name="job", model=model_from_config(config), global_batch=1, sequence=8)
    assert problems_of(folder, job) == [
        f"{folder}: lm_head.weight: is missing; "
        "the checkpoint ties it to the embedding: set tied = true"
    ]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    job = job_of(saved(theirs("vit"), tmp_path))
    assert "does not exist" in problems_of(tmp_path / "none.safetensors", job)[0]
    assert "does not exist" in problems_of(tmp_path / "empty", job)[0]
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in problems_of(tmp_path, job)[0]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "does not say which file" in problems_of(tmp_path, job)[0]


def test_family_unknown_to_hugging_face_is_refused(tmp_path: Path) -> None:
    folder = saved(theirs("gpt2"), tmp_path)
    gated = build_model("gpt2", layers=1, hidden=16, heads=4, activation="swiglu")
    job = Job(name="job", model=gated, global_batch=1, sequence=8)
    assert problems_of(folder, job) == [
        "model: has mlp.gate.weight, which no gpt2 of Hugging Face has; "
        "train it from initial weights"
    ]
