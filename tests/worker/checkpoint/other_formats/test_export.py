"""A checkpoint can be taken elsewhere, bit by bit: to Hugging Face, to DeepSpeed and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from agents.protocol.records import JobId
from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.resume import take_in
from sailord.cli.main import main
from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import SPEC, flip, make, read_full, whole_state, write_full
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.manifest import hash_of
from worker.checkpoint.other_formats.convert import (
    export_deepspeed,
    export_huggingface,
    external_names,
    import_deepspeed,
)
from worker.checkpoint.snapshot_file import read_header, read_piece

ROOT = Path(__file__).resolve().parents[4]
LLAMA = SPEC.replace('"gpt2"', '"llama"').replace("heads = 4", "heads = 4\nkv_heads = 2\nffn = 32")
SPECS = {"gpt2": SPEC, "llama": LLAMA}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_two_workers_wrote_is_read_as_it_was(tmp_path, family):
    made = make(tmp_path / "kept", 10, spec=SPECS[family])
    whole = read_full(made.durable.manifest)
    assert whole.progress == made.whole.progress
    for found, given in zip(whole.kinds, made.whole.kinds, strict=True):
        assert found.keys() == given.keys()
        assert all(torch.equal(found[key], given[key]) for key in given)


def test_hugging_face_reads_the_weights(tmp_path):
    made = make(tmp_path / "kept", 10)
    out = tmp_path / "hf"
    export_huggingface(open_saved_state(made.durable.manifest), out)
    import transformers  # noqa: PLC0415 - takes seconds

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    own = made.whole.kinds[0]
    embedding = loaded.transformer.wte.weight
    assert embedding.shape == (61, 16), "padding is never exported"
    (name,) = (name for layer, name in own if layer == 0 and own[layer, name].shape == (62, 16))
    assert torch.equal(embedding.detach(), own[0, name][:61])


def test_hugging_face_loads_every_tensor_of_a_llama_as_it_was_exported(tmp_path):
    made = make(tmp_path / "kept", 10, spec=LLAMA)
    out = tmp_path / "hf"
    export_huggingface(open_saved_state(made.durable.manifest), out)
    import transformers  # noqa: PLC0415 - takes seconds

    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    stored = load_file(out / "model.safetensors")
    state = loaded.state_dict()
    assert stored.keys() <= state.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_to_deepspeeds_form_and_back_changes_no_bit(tmp_path, family):
    made = make(tmp_path / "kept", 10, spec=SPECS[family])
    export_deepspeed(open_saved_state(made.durable.manifest), tmp_path / "ds")
    job = read_job(SPECS[family])
    header = import_deepspeed(tmp_path / "ds", job, "j", tmp_path / "back.snap")
    assert (header.step, header.progress.updates) == (10, 10)
    write_full(made.whole, "j", tmp_path / "direct.snap")
    direct = read_header(tmp_path / "direct.snap")
    assert header.model == direct.model
    for mine, theirs in zip(header.pieces, direct.pieces, strict=True):
        back = read_piece(tmp_path / "back.snap", mine)
        assert back == read_piece(tmp_path / "direct.snap", theirs), mine


@pytest.mark.at_length
def test_deepspeed_continues_from_the_export(tmp_path):
    made = make(tmp_path / "kept", 10)
    export_deepspeed(open_saved_state(made.durable.manifest), tmp_path / "ds")
    script = [sys.executable, "-m", "tests.worker.checkpoint.other_formats.deepspeed_reads"]
    done = subprocess.run(
        [*script, str(tmp_path / "ds"), made.durable.manifest],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tensors are equal" in done.stdout


@pytest.mark.at_length
@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_own_script_made_is_imported_bit_by_bit(tmp_path, stage):
    script = [sys.executable, "-m", "tests.worker.checkpoint.other_formats.deepspeed_writes"]
    done = subprocess.run(
        [*script, str(tmp_path / "ds"), str(stage)],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job, file = read_job(SPEC), tmp_path / "out.snap"
    header = import_deepspeed(tmp_path / "ds", job, "j", file)
    assert (header.step, header.progress.updates, header.progress.samples) == (2, 2, 8)
    durable = take_in(open_storage(f"file://{tmp_path}/kept"), JobId("j"), job, SPEC, file)
    whole = read_full(durable.manifest)
    expected = torch.load(tmp_path / "ds" / "expected.pt")
    for kind, named in enumerate(external_names(job, each) for each in whole.kinds):
        assert named.keys() == expected.keys()
        for name, value in named.items():
            assert torch.equal(value.view(-1), expected[name][kind].view(-1)), (kind, name)


@pytest.mark.parametrize("has_shapes", [True, False])
def test_universal_checkpoint_of_stage_3_has_shapes_in_another_file(tmp_path, has_shapes):
    made = make(tmp_path / "kept", 10)
    export_deepspeed(open_saved_state(made.durable.manifest), tmp_path / "ds")
    root = tmp_path / "ds" / "global_step10_universal"
    shapes = {}
    for file in (root / "zero").rglob("*.pt"):
        if file.name in {"step.pt", "optimizer_state.pt"}:
            continue
        found = torch.load(file)
        shapes[str(file.parent.relative_to(root / "zero"))] = found["param"].shape
        torch.save(found["param"].flatten(), file)
    states = root / "mp_rank_00_model_states.pt"
    about = torch.load(states) | ({"param_shapes": [shapes]} if has_shapes else {})
    torch.save(about, root / f"zero_pp_rank_0_{states.name}")
    states.unlink()
    job, back = read_job(SPEC), tmp_path / "back.snap"
    if not has_shapes:
        with pytest.raises(InputError, match=r"fp32.pt: is not of a universal checkpoint"):
            import_deepspeed(tmp_path / "ds", job, "j", back)
        return
    header = import_deepspeed(tmp_path / "ds", job, "j", back)
    write_full(made.whole, "j", tmp_path / "direct.snap")
    for mine, theirs in zip(
        header.pieces, read_header(tmp_path / "direct.snap").pieces, strict=True
    ):
        assert read_piece(back, mine) == read_piece(tmp_path / "direct.snap", theirs), mine


def test_a_damaged_checkpoint_is_not_exported_and_leaves_nothing(tmp_path):
    made = make(tmp_path / "kept", 10)
    path = tmp_path / "kept" / "j" / "1-10" / "0-n0.1.snap"
    piece = next(p for p in read_header(path).pieces if p.bytes)
    flip(path, piece.offset)
    with pytest.raises(InputError, match=f"piece {piece.piece} of layer {piece.layer}"):
        open_saved_state(made.durable.manifest)
    manifest = tmp_path / "kept" / "j" / "1-10" / "manifest-3.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "term": 4}))
    with pytest.raises(InputError, match="hash does not match"):
        open_saved_state(made.durable.manifest)
    document["format"] = 2
    manifest.write_text(json.dumps({**document, "sha256": hash_of(document)}))
    with pytest.raises(InputError, match="has format 2; this version reads 1"):
        open_saved_state(made.durable.manifest)


def test_other_optimizers_and_folders_are_refused(tmp_path):
    sgd = SPEC + 'optimizer = "sgd"\n'
    whole = whole_state(sgd, 3)
    made = make(tmp_path / "kept", 3, spec=sgd, whole=replace(whole, kinds=whole.kinds[:2]))
    state = open_saved_state(made.durable.manifest)
    with pytest.raises(InputError, match="whose moments are not Adam"):
        export_deepspeed(state, tmp_path / "x")
    with pytest.raises(InputError, match="exists already"):
        export_huggingface(state, tmp_path)
    job = read_job(SPEC)
    with pytest.raises(InputError, match="is not a DeepSpeed universal checkpoint"):
        import_deepspeed(tmp_path, job, "j", tmp_path / "out")


@pytest.mark.slow
def test_the_command_exports_with_torch_in_another_process(tmp_path):
    made = make(tmp_path / "kept", 10)
    base, _, job = made.durable.manifest.rpartition("/1-10/")[0].rpartition("/")
    out = tmp_path / "hf"
    done = CliRunner().invoke(main, ["checkpoint", "export", job, "--at", base, "--to", str(out)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json"}
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"
    again = CliRunner().invoke(main, ["checkpoint", "export", job, "--at", base, "--to", str(out)])
    assert again.exit_code == 2
