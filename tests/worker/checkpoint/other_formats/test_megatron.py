"""Checkpoints of Megatron-Core (torch_dist) come in and go out bit by bit."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import numpy
import pytest
import torch
from click.testing import CliRunner

from sailord.planning.job_spec import read_job
from simulator.documents.files import load_document
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import SPEC, make, pieces_of, write_full
from tests.worker.hf_families import language_model
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.other_formats.megatron import export_megatron, import_megatron
from worker.checkpoint.other_formats.torch_dcp import DcpFolder, TensorEntry, write_dcp
from worker.cli.main import main
from worker.models.weight_files.foreign_tensors import Window, module_name
from worker.script.hf_job import described_job
from worker.script.job_text import described_text

LLAMA = SPEC.replace('"gpt2"', '"llama"').replace("heads = 4", "heads = 4\nkv_heads = 2\nffn = 32")
SPECS = {"gpt2": SPEC, "llama": LLAMA}
JOB = """
[model]
hf = "model"

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
steps = 3
"""


def described(folder, family):
    """Return the described job file of a model of transformers, and the model's config."""
    model = language_model(family).float()
    model.save_pretrained(folder / "model")
    path = folder / "job.toml"
    path.write_text(JOB)
    document = load_document(path)
    job, _ = described_job(document)
    path.write_text(described_text(document, job))
    return path, model.config.to_dict()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_to_megatron_and_back_changes_no_bit(kind, tmp_path):
    made = make(tmp_path / "kept", 10, spec=SPECS[kind])
    export_megatron(open_saved_state(made.durable.manifest), None, tmp_path / "out")
    job = read_job(SPECS[kind])
    header = import_megatron(tmp_path / "out", job, None, "j", tmp_path / "back.snap")
    assert (header.step, header.progress.updates) == (10, 10)
    write_full(made.whole, "j", tmp_path / "direct.snap")
    assert pieces_of(tmp_path / "back.snap") == pieces_of(tmp_path / "direct.snap")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_models_of_transformers_go_there_and_back(family, tmp_path):
    path, config = described(tmp_path, family)
    made = make(tmp_path / "kept", 10, spec=path.read_text())
    out = tmp_path / "out"
    given = ["--to", str(out), "--form", "megatron", "--job", str(path)]
    done = CliRunner().invoke(main, ["export-checkpoint", made.durable.manifest, *given])
    assert done.exit_code == 0, done.output
    header = import_megatron(out, made.whole.job, config, "j", tmp_path / "back.snap")
    assert header.progress.updates == 10
    write_full(made.whole, "j", tmp_path / "direct.snap")
    assert pieces_of(tmp_path / "back.snap") == pieces_of(tmp_path / "direct.snap")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_megatrons_tensors_are_as_megatron_computes_with_them(family, tmp_path):
    """The fused tensors, built here from the weights of transformers in plain torch."""
    path, config = described(tmp_path, family)
    made = make(tmp_path / "kept", 10, spec=path.read_text())
    export_megatron(open_saved_state(made.durable.manifest), config, tmp_path / "out")
    opened = DcpFolder(tmp_path / "out" / "iter_0000010")
    weights = {module_name(made.whole.job, *k): v for k, v in made.whole.kinds[0].items()}
    layers = range(3)
    if family == "gpt2":
        block = "transformer.h.{}."
        thirds = [weights[block.format(i) + "attn.c_attn.weight"].T.chunk(3) for i in layers]
        inner = [weights[block.format(i) + "mlp.c_fc.weight"].T for i in layers]
        groups = 4
    else:
        block = "model.layers.{}.self_attn.{}_proj.weight"
        thirds = [[weights[block.format(i, part)] for part in "qkv"] for i in layers]
        names = ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight")
        inner = [torch.cat([weights[name.format(i)] for name in names]) for i in layers]
        groups = 2
    fused = [
        torch.cat(
            [
                each
                for group in zip(*(p.chunk(groups) for p in parts), strict=True)
                for each in group
            ]
        )
        for parts in thirds
    ]
    for name, expected in (
        ("self_attention.linear_qkv.weight", fused),
        ("mlp.linear_fc1.weight", inner),
    ):
        assert torch.equal(opened.read(f"decoder.layers.{name}"), torch.stack(expected))


def test_masters_are_preferred_and_padding_of_the_vocabulary_is_dropped(tmp_path):
    """A checkpoint of bf16 training as Megatron's optimizer for it writes one."""
    made = make(tmp_path / "kept", 10, spec=LLAMA)
    export_megatron(open_saved_state(made.durable.manifest), None, tmp_path / "out")
    root = tmp_path / "out" / "iter_0000010"
    old = DcpFolder(root)
    entries = []
    for key in old.stored():
        values = old.read(key)
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            values = torch.cat([values, torch.ones(67, 16)])
        narrow = values if key.startswith("optimizer.") else values.bfloat16()
        entries.append(TensorEntry((key,), narrow.shape, lambda n=narrow: n, narrow.dtype))
        if not key.startswith("optimizer."):
            path = (f"optimizer.state.fp32_param.{key}",)
            entries.append(TensorEntry(path, values.shape, lambda v=values: v))
    new = tmp_path / "bf16"
    write_dcp(entries, new)
    (new / "metadata.json").write_text((root / "metadata.json").read_text())
    common = torch.load(root / "common.pt", weights_only=False)
    common["args"] = Namespace(consumed_train_samples=123)
    torch.save(common, new / "common.pt")
    header = import_megatron(new, read_job(LLAMA), None, "j", tmp_path / "back.snap")
    assert header.progress.samples == 123
    write_full(made.whole, "j", tmp_path / "direct.snap")
    assert pieces_of(tmp_path / "back.snap") == pieces_of(tmp_path / "direct.snap")


def weights_alone(tmp_path, **arguments):
    """A checkpoint of LLaMA's weights at step 10, without an optimizer, and its arguments."""
    made = make(tmp_path / "kept", 10, spec=LLAMA)
    export_megatron(open_saved_state(made.durable.manifest), None, tmp_path / "out")
    root, new = tmp_path / "out" / "iter_0000010", tmp_path / "alone"
    old = DcpFolder(root)
    keys = [key for key in old.stored() if not key.startswith("optimizer.")]
    shapes = {key: old.stored()[key].shape for key in keys}
    write_dcp([TensorEntry((k,), shapes[k], lambda k=k: old.read(k)) for k in keys], new)
    (new / "metadata.json").write_text((root / "metadata.json").read_text())
    torch.save({"iteration": 10, "args": Namespace(**arguments)}, new / "common.pt")
    return new


def test_weights_alone_begin_with_moments_of_zero_and_no_updates(tmp_path):
    """Else Adam's first steps would be several times too large: it corrects by the updates."""
    arguments = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
    folder = weights_alone(tmp_path, **arguments, eps=numpy.float64(1e-8))
    header = import_megatron(folder, read_job(LLAMA), None, "j", tmp_path / "back.snap")
    assert (header.step, header.progress.updates) == (10, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_attention_heads": 8}, "has 8 heads in 8 groups, the model 4 in 2"),
        ({"apply_layernorm_1p": True}, "stores norms less one"),
    ],
)
def test_weights_that_mean_something_else_are_refused(tmp_path, arguments, said):
    folder = weights_alone(tmp_path, **arguments)
    with pytest.raises(InputError, match=said):
        import_megatron(folder, read_job(LLAMA), None, "j", tmp_path / "back.snap")


def test_a_tensor_of_which_a_shard_is_missing_is_refused(tmp_path):
    half = TensorEntry(("w",), (2, 3), lambda: torch.ones(2, 3), window=Window((0, 0), (4, 3)))
    write_dcp([half], tmp_path / "half")
    with pytest.raises(InputError, match="lacks 6 of the 12 elements of w; save it anew"):
        DcpFolder(tmp_path / "half").read("w")


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    made = make(tmp_path / "kept", 10, spec=LLAMA)
    state = open_saved_state(made.durable.manifest)
    export_megatron(state, None, tmp_path / "out")
    job, out = read_job(LLAMA), tmp_path / "in.snap"
    with pytest.raises(InputError, match=r"is not a distributed checkpoint of Megatron"):
        import_megatron(tmp_path, job, None, "j", out)
    wider = read_job(LLAMA.replace("ffn = 32", "ffn = 36"))
    with pytest.raises(InputError, match=r"linear_fc1\.weight: has shape 2 x 64 x 16, the model's"):
        import_megatron(tmp_path / "out", wider, None, "j", out)
    with pytest.raises(InputError, match=r"output_layer\.weight is not a tensor of the model"):
        import_megatron(tmp_path / "out", read_job(SPEC), None, "j", out)
    root = tmp_path / "out" / "iter_0000010"
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(InputError, match="has the format zarr; save it with --dist-ckpt-format"):
        import_megatron(tmp_path / "out", job, None, "j", out)
    assert not out.exists()


def test_an_optimizer_sharded_by_buffers_is_refused(tmp_path):
    flat = TensorEntry(("optimizer.distributed.0.exp_avg",), (8,), lambda: torch.zeros(8))
    write_dcp([flat], tmp_path / "mg")
    (tmp_path / "mg" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(InputError, match="not stored by parameter; save it with --dist-ckpt-optim"):
        import_megatron(tmp_path / "mg", read_job(LLAMA), None, "j", tmp_path / "in.snap")


def test_modules_without_a_config_and_frozen_ones_are_refused(tmp_path):
    path, config = described(tmp_path, "llama")
    job = read_job(path.read_text())
    state = open_saved_state(make(tmp_path / "kept", 1, spec=path.read_text()).durable.manifest)
    with pytest.raises(InputError, match="config is not known; give its script or job file"):
        export_megatron(state, None, tmp_path / "out")
    with pytest.raises(InputError, match="the model: is gemma, whose tensors"):
        export_megatron(state, {**config, "model_type": "gemma"}, tmp_path / "out")
    first = replace(job.model.layers[0].tensors[0], frozen=True)
    layer = replace(job.model.layers[0], tensors=(first, *job.model.layers[0].tensors[1:]))
    model = replace(job.model, layers=(layer, *job.model.layers[1:]))
    with pytest.raises(InputError, match="is frozen, and so not in checkpoints"):
        export_megatron(replace(state, job=replace(job, model=model)), config, tmp_path / "out")
