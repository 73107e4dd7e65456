"""A job file that names a model of transformers trains it like the built-in one."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from tests.worker.hf_families import image_model, save_small_job
from tests.worker.small_run import PLAN, stage
from worker.script.open_job import open_job

TRAINING = """
[training]
global_batch = 8
sequence = SEQUENCE
precision = "fp32"
max_tp = 2
steps = 3
learning_rate = 0.01
schedule = "cosine"
clip_norm = 1.0

[objective]
deadline = 2031-01-01T00:00:00Z
"""


def write(folder, model, *, sequence=12, data='[data]\ntokens = "tokens.npy"\n'):
    text = f"[model]\n{model}\n{TRAINING.replace('SEQUENCE', str(sequence))}\n{data}"
    (folder / "job.toml").write_text(text)
    plan = {**PLAN, "pipelines": [*PLAN["pipelines"]]}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "job.toml"


@pytest.fixture
def place(tmp_path):
    """Return a folder with a LLaMA of two blocks and a text."""
    save_small_job(tmp_path)
    return tmp_path


def steps_of(done):
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.slow
def test_job_of_a_folder_trains_like_the_built_in_model_under_any_plan(warm, place):
    own = write(place, 'hf = "llama"')
    plan = ("--plan", place / "plan.json", "--json")
    alone = steps_of(warm.run("run", "--job", own, "--json"))
    many = steps_of(warm.run("run", "--job", own, *plan, "--save", place / "out"))
    built_in = write(place, 'hf_config = "llama/config.json"\nweights = "llama"')
    theirs = steps_of(warm.run("run", "--job", built_in, *plan))
    for other in (many, theirs):
        assert [s["sample_hash"] for s in other] == [s["sample_hash"] for s in alone]
        assert [s["loss"] for s in other] == pytest.approx([s["loss"] for s in alone], rel=2e-5)
    assert alone[0]["loss"] != alone[2]["loss"]
    trained = AutoModelForCausalLM.from_pretrained(place / "out")
    assert trained.config.num_hidden_layers == 2


@pytest.mark.slow
def test_described_job_reads_back_and_trains_the_same(warm, place):
    path = write(place, 'hf = "llama"')
    with pytest.raises(InputError, match="python -m worker describe"):
        load_job(path)
    done = warm.run("describe", path)
    assert done.code == 0, done.err
    before, recipe = open_job(path)
    losses = [step["loss"] for step in steps_of(warm.run("run", "--job", path, "--json"))]
    path.write_text(done.out)
    job = read_job(done.out)
    assert (job.hf, job.max_tp, job.model) == ("llama", 2, before.model)
    assert job.model.layers[1].output_per_token == 16
    assert recipe is not None
    again = [step["loss"] for step in steps_of(warm.run("run", "--job", path, "--json"))]
    assert again == losses


def test_job_that_trains_until_it_is_cancelled_is_described(place):
    path = write(place, 'hf = "llama"')
    text = path.read_text().replace("steps = 3\n", "").replace('schedule = "cosine"\n', "")
    path.write_text(text)
    job, _ = open_job(path)
    assert (job.steps, job.max_tp) == (None, 2)


@pytest.mark.slow
def test_job_of_a_vision_transformer_trains_on_images(warm, tmp_path):
    image_model().float().save_pretrained(tmp_path / "vit")
    path = write(tmp_path, 'hf = "vit"', sequence=1, data="")
    plan = {
        "micro_batch_size": 2,
        "pipelines": [{"micro_batches": 4, "stages": [stage(0, 2), stage(2, 5)]}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    alone = steps_of(warm.run("run", "--job", path, "--json"))
    two = steps_of(warm.run("run", "--job", path, "--plan", tmp_path / "plan.json", "--json"))
    assert [s["loss"] for s in two] == pytest.approx([s["loss"] for s in alone], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ('hf = "llama"\npreset = "gpt2"', {}, "is given together with preset"),
        ('hf = "llama"\nweights = "llama"', {}, "is given together with weights"),
        ('hf = "llamas"', {}, "llamas: is neither a folder"),
        ('hf = "llama"', {"sequence": 400}, "holds 300 tokens, fewer than the 401"),
    ],
)
def test_job_that_cannot_train_is_refused(warm, place, model, changes, said):
    done = warm.run("describe", write(place, model, **changes))
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_images_that_a_processor_scales_otherwise_are_refused(tmp_path):
    image_model().float().save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"image_mean": [0.48, 0.5, 0.5]}')
    path = write(tmp_path, 'hf = "vit"', sequence=1, data='[data]\nimages = "photos"\n')
    with pytest.raises(InputError, match="has image_mean"):
        open_job(path)


def test_submitted_description_must_be_inline_and_of_code():
    for text in ('hf = "x"\ndescription = "/etc/passwd"', 'description = "{}"'):
        with pytest.raises(InputError, match="names a file of the model with description"):
            read_job(f"[model]\n{text}\n[training]\nglobal_batch = 4\nsequence = 1\n")
