"""Models from local folders: read bit-equally under any plan, a share per rank, and written."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import sailor
from simulator.documents.problems import InputError
from tests.worker.hf_families import FAMILIES, MIXTURES, image_model, language_model, sentences
from tests.worker.random_plan import any_plan
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import drawn
from worker.data.datasets.map_dataset import default_collate
from worker.layout.tensor_table import tensors_of
from worker.script.recipe import Recipe
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer


def images(count=8):
    return [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 5} for i in range(count)]


def recipe_of(model, dataset=None):
    return Recipe(model=model, dataset=dataset or sentences(), batch_size=8, steps=1)


def shares_of(recipe, job, plan):
    """Return the ranks' trainers, before any step."""

    def body(transport):
        return RankTrainer(*(job, plan, transport.rank, transport, recipe.data()), module=recipe)

    return run_as_threads(plan.device_count, body)


def weights_under(recipe, job, plan):
    ranks = shares_of(recipe, job, plan)
    merged = merge_ranks([rank_tensors(rank.buffers.values()) for rank in ranks], tensors_of(job))
    return {
        recipe.cut.full_name(max(layer, 0), name): tensor
        for (layer, name, kind), tensor in merged.items()
        if kind == "master"
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, "vit"])
def test_ranks_hold_the_weights_that_from_pretrained_reads(family, tmp_path):
    dtype = torch.bfloat16 if family == "qwen2" else torch.float32
    model = image_model() if family == "vit" else language_model(family)
    size = "20KB" if family == "llama" else "1GB"
    model.to(dtype).save_pretrained(tmp_path, max_shard_size=size)
    auto = AutoModelForImageClassification if family == "vit" else AutoModelForCausalLM
    wanted = dict(auto.from_pretrained(tmp_path).named_parameters())
    recipe = recipe_of(sailor.hf(tmp_path), images() if family == "vit" else None)
    job = recipe.job()
    for seed in range(2):
        found = weights_under(recipe, job, any_plan(drawn(seed), job, ranks_max=5))
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert weight.dtype == dtype
            assert torch.equal(found[name], weight.float()), name


def mapped_from(folder):
    """Return the address ranges in which this process has mapped the files of a folder."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file if str(folder) in line]
    return [tuple(int(part, 16) for part in line[0].split("-")) for line in lines]


@pytest.mark.slow
def test_parameters_take_no_memory_before_a_rank_takes_its_share(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    language_model("llama", **sizes).float().save_pretrained(tmp_path, max_shard_size="30MB")
    module = sailor.hf(tmp_path)
    ranges = mapped_from(tmp_path)
    assert sum(p.numel() * 4 for p in module.parameters()) > 80e6
    recipe = recipe_of(module)
    job = recipe.job()
    plan = any_plan(drawn(1), job, ranks_max=4)
    ranks = shares_of(recipe, job, plan)
    for name in recipe.cut.layer_of:
        start = recipe.value(name).data_ptr()
        assert any(first <= start < end for first, end in ranges), f"{name} was copied"
    held = [sum(b.master.nbytes for b in rank.buffers.values()) for rank in ranks]
    whole = sum(p.numel() * 4 for p in module.parameters())
    pipelines = len(plan.pipelines)
    assert sum(held) <= 1.02 * whole * pipelines


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft asks for it.
def test_low_rank_adapters_on_mapped_weights(tmp_path):
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    language_model("llama").float().save_pretrained(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    recipe = recipe_of(peft.get_peft_model(sailor.hf(tmp_path), config))
    job = recipe.job()
    found = weights_under(recipe, job, any_plan(drawn(3), job, ranks_max=4))
    assert found
    assert all("lora" in name for name in found)
    ranges = mapped_from(tmp_path)
    start = recipe.value("base_model.model.lm_head.weight").data_ptr()
    assert any(first <= start < end for first, end in ranges)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "neither a folder with a config.json nor a name"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be opened"),
        (lambda f: edit(f, architectures=["BertForMaskedLM"]), "has the architecture BertFor"),
        (lambda f: edit(f, model_type="nothing"), "cannot be opened"),
        (lambda f: edit(f, num_hidden_layers=4), "lacks model.layers.3.input_layernorm.weight, "),
        (lambda f: edit(f, quantization_config={"quant_method": "x"}), "is quantised"),
    ],
)
def test_folder_that_is_no_model_is_refused(change, said, tmp_path):
    folder = tmp_path / "model"
    language_model("llama").save_pretrained(folder)
    change(folder)
    with pytest.raises(InputError, match=said):
        sailor.hf(folder)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_classifier_of_another_number_of_classes_is_new(tmp_path):
    image_model().float().save_pretrained(tmp_path)
    module = sailor.hf(tmp_path, num_labels=3)
    assert module.classifier.weight.shape == (3, 16)


@pytest.mark.parametrize(
    ("change", "name", "cure"),
    [
        ({"num_hidden_layers": 4}, "layers.3.attention.k_proj.bias", "whole model$"),
        ({"intermediate_size": 8}, "layers.0.mlp.fc1.bias", "their shapes in the config$"),
    ],
)
def test_new_classifier_makes_no_other_weights_new(change, name, cure, tmp_path):
    image_model().float().save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=rf"lacks vit.{name}, .*more, which would.*{cure}"
    ) as error:
        sailor.hf(tmp_path, num_labels=3, **change)
    assert "classifier" not in str(error.value)


def test_language_model_has_no_classifier_that_may_be_new(tmp_path):
    language_model("llama").save_pretrained(tmp_path)
    edit(tmp_path, num_hidden_layers=4)
    with pytest.raises(InputError, match=r"lacks model\.layers\.3"):
        sailor.hf(tmp_path, num_labels=3)


SCRIPT = """
import torch
import sailor
from tests.worker.hf_families import sentences

sailor.Trainer(sailor.hf("FOLDER"), sentences(), batch_size=4, steps=2).train()
"""


@pytest.mark.slow
def test_saved_weights_come_with_config_and_tokenizer(warm, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    language_model("gemma").float().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FOLDER", str(source)))
    done = warm.run("run", "--job", script, "--save", source)
    assert (done.code, done.out) == (2, "")
    assert "is the folder of the model that is trained" in done.err
    done = warm.run("run", "--job", script, "--save", out)
    assert done.code == 0, done.err
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (source, out))
    assert (out / "tokenizer.json").read_text() == "{}"
    assert after.config.to_diff_dict() == before.config.to_diff_dict()
    assert before.state_dict().keys() == after.state_dict().keys()
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)
    batch = default_collate(sentences(2))
    with torch.no_grad():
        assert after(**batch).loss < before(**batch).loss


def test_a_name_in_the_local_cache_is_opened_as_its_folder(tmp_path, monkeypatch):
    """Laid out as `hf download` leaves it: a snapshot of links to blobs."""
    hub = pytest.importorskip("huggingface_hub")
    model = language_model("llama").float()
    model.save_pretrained(tmp_path / "folder")
    kept = tmp_path / "cache" / "models--acme--tiny"
    for each in ("blobs", "refs", "snapshots/abc"):
        (kept / each).mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted((tmp_path / "folder").iterdir())):
        shutil.copy(file, kept / "blobs" / str(number))
        (kept / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    found = sailor.hf("acme/tiny").state_dict()
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(InputError, match="name in the local cache"):
        sailor.hf("acme/other")
