"""Checkpoints of torch (DCP) and weights of Hugging Face come in and go out bit by bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

from sailord.cli.main import main as sailorctl
from simulator.documents.files import load_document
from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from tests.sailord.checkpoints.made import SPEC, make, pieces_of, read_full, write_full
from tests.worker.hf_families import language_model
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.other_formats.convert import export_dcp, import_dcp, import_huggingface
from worker.cli.main import main
from worker.models.weight_files.foreign_tensors import module_name
from worker.script.hf_job import described_job
from worker.script.job_text import described_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
JOB = """
[model]
hf = "llama"

[training]
global_batch = 4
sequence = 8
precision = "fp32"
max_tp = 2
steps = 3
"""


@pytest.fixture
def described(tmp_path):
    """Return the described job of a LLaMA of transformers, and its file."""
    language_model("llama").float().save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    document = load_document(path)
    job, _ = described_job(document)
    path.write_text(described_text(document, job))
    return path


@pytest.mark.parametrize("kind", ["gpt2", "module"])
def test_to_dcp_and_back_changes_no_bit(kind, described, tmp_path):
    if kind == "gpt2":
        described.write_text(SPEC)
    made = make(tmp_path / "kept", 10, spec=described.read_text())
    whole = made.whole
    export_dcp(open_saved_state(made.durable.manifest), tmp_path / "dcp")
    header = import_dcp(tmp_path / "dcp", load_job(described), "j", tmp_path / "back.snap")
    write_full(whole, "j", tmp_path / "direct.snap")
    assert (header.step, header.progress.updates) == (10, 10)
    assert pieces_of(tmp_path / "back.snap") == pieces_of(tmp_path / "direct.snap")


def saved_loop(folder, make_optimizer, **others):
    """Train the LLaMA in a plain loop for three steps, and save it as DCP with other tensors."""
    module = AutoModelForCausalLM.from_pretrained(folder / "llama").train()
    optimizer = make_optimizer(module.parameters())
    for _ in range(3):
        tokens = torch.arange(8)[None] + 3
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model, state = get_state_dict(module, optimizer)
    whole = {"model": model | others, "optimizer": state}
    dcp.save(whole, checkpoint_id=folder / "dcp", no_dist=True)
    return module, optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters, momentum=0.9):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=momentum)


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


def test_dcp_of_a_plain_training_loop_is_imported(described, tmp_path):
    module, optimizer = saved_loop(tmp_path, adamw)
    header = import_dcp(tmp_path / "dcp", load_job(described), "j", tmp_path / "in.snap")
    assert (header.step, header.progress.samples) == (3, 12)
    made = make(tmp_path / "kept", 3, spec=described.read_text())
    named = dict(module.named_parameters())
    direct = [{}, {}, {}]
    for key in made.whole.kinds[0]:
        parameter = named[module_name(made.whole.job, *key)]
        held = optimizer.state[parameter]
        values = (parameter.detach(), held["exp_avg"], held["exp_avg_sq"])
        for kind, value in zip(direct, values, strict=True):
            kind[key] = value
    write_full(
        type(made.whole)(made.whole.job, header.progress, tuple(direct)), "j", tmp_path / "x"
    )
    assert pieces_of(tmp_path / "in.snap") == pieces_of(tmp_path / "x")


def test_dcp_that_does_not_say_its_step_needs_it_from_the_user(described, tmp_path):
    saved_loop(tmp_path, sgd)
    job, out = replace(load_job(described), optimizer="sgd"), tmp_path / "in.snap"
    with pytest.raises(InputError, match=r"does not say its step.*; give --step N"):
        import_dcp(tmp_path / "dcp", job, "j", out)
    header = import_dcp(tmp_path / "dcp", job, "j", out, step=3)
    assert (header.step, header.progress.updates, header.progress.samples) == (3, 3, 12)


def test_step_of_a_dcp_that_says_its_own_is_refused(described, tmp_path):
    saved_loop(tmp_path, adamw)
    with pytest.raises(InputError, match="--step: is 2, and the checkpoint is of step 3"):
        import_dcp(tmp_path / "dcp", load_job(described), "j", tmp_path / "in.snap", step=2)


@pytest.mark.parametrize(
    ("make", "optimizer", "told"),
    [
        (adamw, "sgd", r"holds optimizer\.state\..*\.exp_avg, which sgd does not keep"),
        (sgd, "adamw", r"holds optimizer\.state\..*\.momentum_buffer, which adamw does not keep"),
        (amsgrad, "adamw", r"\.max_exp_avg_sq, which adamw does not keep"),
        (partial(sgd, momentum=0), "sgd", "holds no momentum_buffer of its optimizer, sgd"),
    ],
    ids=["adamw for sgd", "sgd for adamw", "amsgrad", "no momentum"],
)
def test_dcp_of_another_optimizer_is_refused(make, optimizer, told, described, tmp_path):
    saved_loop(tmp_path, make)
    job = replace(load_job(described), optimizer=optimizer)
    step = 3 if make is not adamw and make is not amsgrad else None
    with pytest.raises(InputError, match=told):
        import_dcp(tmp_path / "dcp", job, "j", tmp_path / "in.snap", step=step)


def test_tensors_that_the_job_does_not_train_are_named(described, tmp_path, capsys):
    others = {"norm.running_mean": torch.ones(4), "norm.running_var": torch.ones(4)}
    saved_loop(tmp_path, adamw, **others)
    import_dcp(tmp_path / "dcp", load_job(described), "j", tmp_path / "in.snap")
    told = "what the job does not train is left out: norm.running_mean and 1 more; the script"
    assert told in capsys.readouterr().err


def test_weights_of_safetensors_become_a_checkpoint_before_the_first_step(described, tmp_path):
    header = import_huggingface(tmp_path / "llama", load_job(described), "j", tmp_path / "in.snap")
    assert header.step == 0
    dcp_folder = tmp_path / "weights-alone"
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    dcp.save({"model": module.state_dict()}, checkpoint_id=dcp_folder, no_dist=True)
    import_dcp(dcp_folder, load_job(described), "j", tmp_path / "other.snap")
    assert pieces_of(tmp_path / "in.snap") == pieces_of(tmp_path / "other.snap")


def test_checkpoint_of_another_model_is_refused(described, tmp_path):
    with pytest.raises(InputError, match="is not a checkpoint of torch"):
        import_dcp(tmp_path, load_job(described), "j", tmp_path / "in.snap")
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight: is missing"):
        import_dcp(tmp_path / "dcp", load_job(described), "j", tmp_path / "in.snap")
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight: is missing"):
        import_huggingface(
            tmp_path / "a.safetensors", load_job(described), "j", tmp_path / "in.snap"
        )


def test_export_with_the_job_has_config_and_tokenizer(described, tmp_path):
    made = make(tmp_path / "kept", 10, spec=described.read_text())
    out = tmp_path / "out"
    given = ["export-checkpoint", made.durable.manifest, "--to", str(out), "--job", str(described)]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    assert (out / "tokenizer.json").exists()
    found = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    whole = read_full(made.durable.manifest)
    for key, value in whole.kinds[0].items():
        assert torch.equal(found[module_name(whole.job, *key)], value)


@pytest.mark.parametrize("form", ["deepspeed", "dcp"])
def test_forms_that_cannot_use_the_job_refuse_it(form, tmp_path):
    given = ["export-checkpoint", "m", "--to", str(tmp_path / "out"), "--form", form, "--job", "j"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 2
    assert f"is not for --form {form}" in done.output


SCRIPT = """
import sys
import torch
import sailor

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        count = int(open([*sys.argv, "blocks"][1]).read())
        self.blocks = torch.nn.ModuleList(Block() for _ in range(count))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(8)]
sailor.Trainer(Net(), data, batch_size=4, steps=2).train()
"""


@pytest.mark.slow
def test_script_imports_and_exports_by_its_own_names(tmp_path, capfd):
    script, out = tmp_path / "scripts" / "train.py", tmp_path / "out"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (tmp_path / "blocks").write_text("2")  # Paths are relative to the folder that travels.
    shapes = {"head.weight": (3, 8), "head.bias": (3,)}
    for number in range(2):
        shapes |= {f"blocks.{number}.inner.weight": (8, 8), f"blocks.{number}.inner.bias": (8,)}
    weights = {name: torch.rand(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "given.safetensors")
    words = [str(tmp_path / "given.safetensors"), "--job", str(script), "--name", "j"]
    words += ["--workdir", str(tmp_path)]
    place = ["--checkpoint", f"file://{tmp_path}/kept", "--form", "huggingface"]
    done = CliRunner().invoke(sailorctl, ["checkpoint", "import", *words, *place, "--", "blocks"])
    assert done.exit_code == 0, done.output
    assert "step 0 of j is at" in done.output
    done = CliRunner().invoke(
        sailorctl,
        ["checkpoint", "export", "j", "--at", f"file://{tmp_path}/kept", "--to", str(out)],
    )
    assert done.exit_code == 0, done.output
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    again, inside = tmp_path / "again", ["--workdir", str(tmp_path)]
    export = ["checkpoint", "export", "j", "--at", f"file://{tmp_path}/kept", "--to", str(again)]
    done = CliRunner().invoke(sailorctl, [*export, *inside])
    assert "--workdir: is the folder of a script; name it by --job" in done.output
    done = CliRunner().invoke(sailorctl, [*export, "--job", str(script), *inside])
    assert done.exit_code == 0, done.output
    found = load_file(again / "model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    for blocks in ("3", "4"):
        (tmp_path / "blocks").write_text(blocks)
        other = tmp_path / f"of-{blocks}"
        changed = [*export[:-1], str(other), "--job", str(script), *inside]
        done = CliRunner().invoke(sailorctl, changed)
        assert done.exit_code == 2, done.output
        shown = capfd.readouterr().err
        assert f"its number of layers is {int(blocks) + 2} here, and 4 in the" in shown
        assert not other.exists()
    (tmp_path / "blocks").write_text("2")
    done = CliRunner().invoke(sailorctl, ["checkpoint", "import", *words, "--", "blocks"])
    assert "has no place for checkpoints; give --checkpoint URI" in done.output
