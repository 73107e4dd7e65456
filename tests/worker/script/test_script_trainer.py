"""A script trains alone as a plain loop would, and under plans to the same losses."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sailor
from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.script.job_text import job_text
from worker.script.load import load_script
from worker.script.one_rank_plan import one_rank_plan
from worker.script.torch_settings import settings_of
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer

SCRIPT = """
import sys
import torch
from torch import nn
import sailor

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
data = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(30)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

def main():
    try:
        sailor.Trainer(
            model,
            data,
            batch_size=6,
            steps=int(sys.argv[1]) if len(sys.argv) > 1 else 4,
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
            optimizer=optimizer,
            name="small",
        ).train()
    except Exception:
        print("caught")

if __name__ == "__main__":
    main()
"""


DECAYING = SCRIPT.replace("momentum=0.5", "momentum=0.5, nesterov=True, weight_decay=0.2")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def stages(*cuts):
    place = {"gpu": "any", "machine": "this", "zone": "here", "recompute": "full"}
    return [{"layers": list(pair), "tp": 1, **place} for pair in pairwise(cuts)]


def test_a_script_gives_its_recipe_when_it_calls_train(script):
    recipe = load_script(script, ["7"])
    assert (recipe.steps, recipe.batch_size, recipe.name) == (7, 6, "small")
    assert recipe.settings.optimizer == "sgd"
    assert recipe.settings.update.momentum == 0.5
    assert recipe.cut.blocks == ("0", "1", "2", "3")


@pytest.mark.parametrize("text", [SCRIPT, DECAYING], ids=["plain", "decaying"])
def test_the_text_of_a_scripts_job_reads_back_as_the_job(text, script, tmp_path):
    script.write_text(text)
    job = load_script(script).job()
    path = tmp_path / "job.toml"
    path.write_text(job_text(job, script))
    read = load_job(path)
    assert read.script == str(script)
    assert replace(read, script=None) == job


def test_a_script_that_prints_is_described_all_the_same(script, warm, tmp_path):
    script.write_text(f"print('hello')\n{SCRIPT}")
    done = warm.run("describe", script)
    assert done.code == 0, done.err
    path = tmp_path / "job.toml"
    path.write_text(done.out)
    assert load_job(path).name == "small"
    assert "hello" in done.err
    assert "note: planned without tensor parallelism: Sequential declares no" in done.err


@pytest.mark.slow
def test_a_script_trains_alone_and_under_a_plan_to_the_same_losses(script, warm):
    losses = []
    trainer = sailor.Trainer(**_given(load_script(script)))
    trainer.train()
    losses.append([report.loss for report in trainer.history])
    plan = script.with_name("plan.json")
    pipelines = [
        {"micro_batches": 2, "stages": stages(0, 2, 6)},
        {"micro_batches": 1, "stages": stages(0, 6)},
    ]
    plan.write_text(json.dumps({"micro_batch_size": 2, "pipelines": pipelines}))
    done = warm.run("run", "--job", script, "--plan", plan, "--json")
    assert done.code == 0, done.err
    losses.append([json.loads(line)["loss"] for line in done.out.splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _given(recipe):
    """Return the arguments that a recipe was made of."""
    return {
        "model": recipe.model,
        "dataset": recipe.dataset,
        "batch_size": recipe.batch_size,
        "steps": recipe.steps,
        "loss": recipe.loss,
        "optimizer": recipe.make_optimizer,
    }


ANY = "import sailor\nsailor.Trainer(None, [], batch_size=1, steps=1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sailor", "does not call train"),
        ("raise SystemExit(3)", r"ended with 3 before train\(\)$"),
        (
            "import argparse\np = argparse.ArgumentParser()\n"
            "p.add_argument('--data', required=True)\np.parse_args()",
            "ended with 2 .*: train.py: error: the following arguments are required: --data",
        ),
        (
            f"{ANY}, optimizer=__import__('torch').optim.AdamW)",
            r"optimizer=AdamW, a class; give one, or .* lambda model: AdamW\(model.parameters",
        ),
        ("x = 1\n1 / 0", r"train.py:2: ZeroDivisionError"),
        ("import sailor\nsailor.Trainer(None, [], batch_size=1)", "needs steps or epochs"),
        (f"{ANY}, clip_norm=0)", "has clip_norm=0; give the largest norm"),
        (f"{ANY}, clip_norm=-1.0)", "has clip_norm=-1.0"),
        (f"{ANY}, clip_norm='1')", "has clip_norm='1'"),
        (
            "import sailor\nsailor.Trainer(None, [], batch_size=0, steps=2.5)",
            "batch_size=0; .*\n.*2.5;",
        ),
        (
            "import sailor\nsailor.Trainer(None, [], batch_size=1, epochs=-1)",
            "has epochs=-1; give a",
        ),
        (f"{ANY}, eval_every=2.5, eval_dataset=[1])", "eval_every=2.5; give a whole number"),
        (f"{ANY}, eval_dataset=[])", "eval_dataset: is empty"),
        (
            f"{ANY}, seed=-1, skip_nonfinite=-1, max_tp=0)",
            "skip_nonfinite=-1(.|\n)*max_tp=0(.|\n)*seed=-1",
        ),
        (f"{ANY}, metrics={{'loss': len}})", "has a metric with the name loss"),
        (f"{ANY}, precision='float16')", "has precision='float16'; give one of"),
        (f"{ANY}, recompute=True)", "has recompute=True; give one of none, full, auto"),
    ],
)
def test_a_script_that_cannot_be_used_is_refused_with_its_line(text, reason, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        load_script(path)


def test_one_of_several_processes_does_not_train(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    trainer = sailor.Trainer(nn.Linear(2, 2), [torch.ones(2)] * 4, batch_size=2, steps=1)
    with pytest.raises(InputError, match="in one of 4 processes, each of which would train the"):
        trainer.train()


def test_optimizers_that_ranks_would_not_compute_alike_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.RMSprop(module.parameters())
    data = [(torch.ones(2), 0)] * 4
    trainer = sailor.Trainer(module, data, batch_size=2, steps=1, optimizer=optimizer)
    with pytest.raises(InputError, match="is a RMSprop"):
        trainer.train()


@pytest.mark.parametrize(("is_decoupled", "named"), [(True, "adamw"), (False, "adam")])
def test_adam_with_decoupled_weight_decay_is_adamw(is_decoupled, named):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), decoupled_weight_decay=is_decoupled)
    assert settings_of(optimizer, None, steps=1).optimizer == named


@pytest.mark.parametrize("as_count", [float, torch.tensor])
def test_weights_in_the_count_of_a_loss_are_refused(as_count):
    """Counts of micro batches are summed as integers."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    data = [(torch.ones(2), 0)] * 4

    def loss(output, _):
        return output.sum(), as_count(0.7 * len(output))

    trainer = sailor.Trainer(module, data, batch_size=2, steps=1, loss=loss)
    with pytest.raises(InputError, match=r"returns a count.* that is not whole"):
        trainer.train()


def test_group_of_rate_0_may_have_a_schedule():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": module[0].parameters()}, {"params": module[1].parameters(), "lr": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    data, frozen = [(torch.ones(2), 0)] * 4, module[1].weight.clone()
    given = {"optimizer": optimizer, "scheduler": schedule}
    sailor.Trainer(module, data, batch_size=2, steps=2, **given).train()
    assert torch.equal(module[1].weight, frozen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())}, "not the model's"),
        ({"dataset": []}, "dataset: is empty"),
        ({"loss": lambda output, _: output}, "loss: returns"),
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)},
            "changes more than learning rates",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau is not supported",
        ),
    ],
    ids=["optimizer", "data", "loss", "one cycle", "plateau"],
)
def test_what_would_train_wrongly_is_refused(changes, reason):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    given = {"model": module, "dataset": data, "batch_size": 2, "steps": 3, **changes}
    with pytest.raises(InputError, match=reason):
        sailor.Trainer(**given).recipe.job()


def stepped(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def hooked(kind):
    def optimizer(module):
        made = torch.optim.SGD(module.parameters(), lr=0.1)
        getattr(made, f"register_step_{kind}_hook")(lambda *_: None)
        return made

    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (stepped, "has the state of steps before, .* sailorctl checkpoint import --form dcp"),
        (hooked("pre"), "has hooks of its steps"),
        (hooked("post"), "has hooks of its steps"),
    ],
    ids=["state", "hook before", "hook after"],
)
def test_what_ranks_would_not_take_from_an_optimizer_is_refused(optimizer, reason):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    data = [(torch.ones(2), 0)] * 4
    given = {"batch_size": 2, "steps": 1, "optimizer": optimizer(module)}
    with pytest.raises(InputError, match=f"optimizer: {reason}"):
        sailor.Trainer(module, data, **given).recipe.job()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_trained_parameters_are_refused_by_name(kind):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for number in (1, 2):
        getattr(module[number].bias, kind)(lambda _: None)
    trained = [*module[0].parameters(), *module[2].parameters()]  # So that 1.bias is frozen.
    data = [(torch.ones(2), 0)] * 4
    given = {"batch_size": 2, "steps": 1, "optimizer": torch.optim.SGD(trained, lr=0.1)}
    with pytest.raises(InputError, match=r"model: 2.bias has a hook on its gradient"):
        sailor.Trainer(module, data, **given).recipe.job()


def test_frozen_weights_are_saved_with_the_trained_ones(script, warm):
    text = SCRIPT.replace("def main", "model[0].weight.requires_grad = False\n\ndef main")
    script.write_text(text)
    folder = Path(script.parent, "saved")
    done = warm.run("run", "--job", script, "--save", folder)
    assert done.code == 0, done.err
    saved = load_file(folder / "model.safetensors")["0.weight"]
    assert torch.equal(saved, load_script(script).value("0.weight"))


def test_a_saved_module_reads_back(script, warm):
    folder = Path(script.parent, "saved")
    done = warm.run("run", "--job", script, "--save", folder)
    assert done.code == 0, done.err
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == {"0.weight", "0.bias", "3.weight", "3.bias"}


class Recorded(list):
    """Samples, and how many of them each thread loaded."""

    def __getitem__(self, index):
        loaded_by[threading.current_thread().name] += 1
        return super().__getitem__(index)


loaded_by: Counter[str] = Counter()


def test_evaluations_load_their_samples_beside_the_thread_that_computes(script):
    recipe = load_script(script)
    held_back = Recorded(recipe.dataset[:11])
    trainer = sailor.Trainer(**_given(recipe), eval_dataset=held_back, eval_every=2)
    loaded_by.clear()
    trainer.train()
    assert sorted(trainer.evaluations) == [1, 3]
    assert loaded_by.pop("MainThread") == 6, "one batch is tried before training"
    assert loaded_by == {"data": 22}


EVALUATED = SCRIPT.replace(
    'name="small",',
    """
            eval_dataset=data[:11],
            eval_every=2,
            metrics={"accuracy": lambda output, batch: (output.argmax(-1) == batch[1]).float()},
            loggers=[sailor.JsonLines(sys.argv[0] + ".jsonl"), sailor.TensorBoard("/dev/null/x")],
            callbacks=[lambda step, values: print("told", step, *values)],""",
)


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.slow
def test_evaluations_are_those_of_torch_under_any_plan(script, warm, capsys):
    script.write_text(EVALUATED)
    recipe = load_script(script)
    trainer = sailor.Trainer(
        **_given(recipe),
        eval_dataset=recipe.eval_dataset,
        eval_every=2,
        metrics=recipe.more_metrics,
        loggers=recipe.loggers,
    )
    trainer.train()
    assert "TensorBoard is not used any more" in capsys.readouterr().out
    assert sorted(trainer.evaluations) == [1, 3]
    module = recipe.model.eval()
    inputs, labels = recipe.collate(list(recipe.eval_dataset))
    found = trainer.evaluations[3]
    assert found["loss"] == pytest.approx(
        nn.functional.cross_entropy(module(inputs), labels).item(), rel=1e-5
    )
    hits = (module(inputs).argmax(-1) == labels).float()
    assert found["accuracy"] == pytest.approx(hits.mean().item(), rel=1e-6)
    lines = [json.loads(line) for line in Path(f"{script}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 1, 2, 3, 3]
    assert lines[2]["eval/loss"] == trainer.evaluations[1]["loss"]
    assert lines[0]["learning_rate"] == 0.1

    plan = script.with_name("plan.json")
    pipelines = [
        {"micro_batches": 4, "stages": stages(0, 2, 6)},
        {"micro_batches": 2, "stages": stages(0, 6)},
    ]
    chunks = [{"micro_batches": n, "stages": stages(0, 1, 3, 5, 6)} for n in (4, 2)]
    for plans in ({"pipelines": pipelines}, {"pipelines": chunks, **INTERLEAVED}):
        plan.write_text(json.dumps({"micro_batch_size": 1, **plans}))
        done = warm.run("run", "--job", script, "--plan", plan, "--json")
        assert done.code == 0, done.err
        told = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        evaluated = {line["step"]: line["evaluation"] for line in told if "evaluation" in line}
        for step, metrics in trainer.evaluations.items():
            assert evaluated[step] == pytest.approx(metrics, rel=1e-5)
        assert "told 3 eval/loss eval/accuracy" in done.out


def test_threads_and_prints_of_a_script_do_not_disturb_a_run(script, warm):
    text = "import threading\nprint('hello')\nthreading.Thread(target=input, daemon=True).start()\n"
    script.write_text(text + SCRIPT)
    done = warm.run("run", "--job", script, "--json", "--", "2")
    assert done.code == 0, done.err
    assert [json.loads(line)["step"] for line in done.out.splitlines()] == [0, 1]


def test_a_script_that_ends_its_process_is_refused(script, warm):
    script.write_text("import os\nos._exit(3)\n")
    done = warm.run("run", "--job", script)
    assert (done.code, done.out) == (2, "")
    assert "error: the script: ended its process, with exit code 3" in done.err


@pytest.mark.parametrize("gathers", [False, True])
def test_a_label_that_a_users_loss_refuses_is_named(gathers):
    tokens = torch.arange(6)
    samples = [(tokens, tokens)] * 5 + [(tokens, torch.full((6,), 77))]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def own(output, batch):
        if gathers:
            return -output.log_softmax(-1).gather(2, batch[1][..., None]).flatten(1).sum(1)
        total = nn.functional.cross_entropy(
            output.flatten(0, 1), batch[1].flatten(), reduction="sum"
        )
        return total, batch[1].numel()

    trainer = sailor.Trainer(Net, samples, batch_size=4, steps=2, loss=own, shuffle=False)
    refused = "index 77 is out of bounds" if gathers else "Target 77 is out of bounds"
    with pytest.raises((IndexError, RuntimeError), match=refused) as told:
        trainer.train()
    assert told.value.__notes__ == ["in labels of the sample at step 1, position 1"]


def test_a_logger_that_fails_in_an_evaluation_is_told_of_with_it(script):
    script.write_text(EVALUATED.replace("loggers=", "#"))

    class Picky:
        def log(self, _, values):
            if "eval/loss" in values:
                raise OSError("no room")

    recipe = replace(load_script(script), loggers=[Picky()])
    about = recipe.job(), one_rank_plan(recipe.job()), 0, SingleRankTransport(), recipe.data()
    rank = RankTrainer(*about, module=recipe)
    told = []
    for _ in range(2):
        rank.log(rank.step())
        told.append(rank.unlogged)
        rank.evaluate_if_due()
    assert told == ["", ""]
    assert rank.unlogged == "Picky is not used any more: OSError: no room"


def test_an_evaluation_that_was_interrupted_is_repeated(script):
    """Who continues after a step evaluates if that was due, with the same result."""
    script.write_text(EVALUATED.replace("loggers=", "#"))
    recipe = load_script(script)
    job = recipe.job()

    def rank():
        about = job, one_rank_plan(job), 0, SingleRankTransport(), recipe.data()
        return RankTrainer(*about, module=recipe)

    first, other = rank(), rank()
    assert first.evaluate_if_due() is None, "nothing was trained"
    for _ in range(2):
        report = first.step()
    first.log(report)
    wanted = first.evaluate_if_due()
    state = merge_ranks([rank_tensors(first.buffers.values())], tensors_of(job))
    other.restore(state, first.progress)
    assert other.evaluate_if_due() == wanted
    other.step()
    assert other.evaluate_if_due() is None
