"""A Trainer of transformers trains the same weights under Sailor."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import sailor
from simulator.documents.problems import InputError
from worker.models.random_numbers.microbatch_context import batch_on_device


class Rows:
    """Twelve rows of tokens, some without a label."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)  # One sampler of transformers reads up to here.
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 31, (9,), generator=generator)
        labels = torch.where(torch.arange(9) < index % 4, -100, tokens)
        return {"input_ids": tokens, "labels": labels}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def theirs(model, folder, kind=transformers.Trainer, more=None, **settings):
    settings = {"train_sampling_strategy": "sequential", **settings}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    return kind(copy.deepcopy(model), args, train_dataset=Rows(), **(more or {}))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_equal_those_of_transformers(model, tmp_path, smoothing):
    reference = theirs(model, tmp_path, label_smoothing_factor=smoothing)
    reference.train()
    trainer = theirs(model, tmp_path, label_smoothing_factor=smoothing)
    ours = sailor.from_transformers(trainer)
    ours.train()
    assert (ours.recipe.batch_size, len(ours.history)) == (4, 3)
    wanted = reference.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
    first = [each["loss"] for each in reference.state.log_history if "loss" in each]
    if first:
        assert ours.history[0].loss == pytest.approx(first[0], rel=1e-4)


@pytest.mark.parametrize(("given", "clipped"), [(-1.0, None), (0.0, None), (0.5, 0.5)])
def test_gradients_are_clipped_as_transformers_does(model, tmp_path, given, clipped):
    trainer = theirs(model, tmp_path, max_grad_norm=given)
    assert sailor.from_transformers(trainer).recipe.clip_norm == clipped


@pytest.mark.parametrize(("given", "recompute"), [(True, "full"), (False, "auto")])
def test_gradient_checkpointing_is_recomputation(model, tmp_path, given, recompute):
    trainer = theirs(model, tmp_path, activation_checkpointing=given)
    assert sailor.from_transformers(trainer).recipe.recompute == recompute


class Own(transformers.Trainer):
    def compute_loss(self, *given, **named):
        return super().compute_loss(*given, **named)


class Caller(transformers.TrainerCallback):
    pass


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"kind": Own}, "compute_loss"),
        ({"more": {"callbacks": [Caller()]}}, "Caller"),
        ({"train_sampling_strategy": "group_by_length"}, "Sampler"),
        ({"label_names": ["targets"]}, "targets"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"more": {"eval_dataset": {"a": Rows(), "b": Rows()}}}, "several eval data sets"),
        (
            {"more": {"callbacks": [transformers.EarlyStoppingCallback()]}},
            "EarlyStoppingCallback",
        ),
        ({"more": {"compute_metrics": print}}, "compute_metrics"),
        ({"more": {"compute_loss_func": print}}, "compute_loss_func"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(model, tmp_path, given, named):
    with pytest.raises(InputError, match=named):
        sailor.from_transformers(theirs(model, tmp_path, **given))


def test_a_logger_that_sailor_does_not_have_is_refused_by_name(model, tmp_path):
    trainer = theirs(model, tmp_path)
    trainer.args.report_to = ["tensorboard", "comet_ml"]
    with pytest.raises(InputError, match="reports to comet_ml, which Sailor does not know"):
        sailor.from_transformers(trainer)
    assert sailor.from_transformers(trainer, loggers=[]).recipe.loggers == ()


@pytest.mark.parametrize("given", [{"steps": 6}, {"epochs": 2}])
def test_a_schedule_is_made_for_the_steps_that_replace_those_of_the_arguments(
    model, tmp_path, given
):
    ours = sailor.from_transformers(theirs(model, tmp_path), **given)
    assert ours.recipe.steps == 6
    rates = [ours.recipe.schedules(step)[0] for step in range(6)]
    assert rates == pytest.approx([0.0, 1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("eval_steps", [2, 0.5])
def test_evaluation_is_as_often_as_the_arguments_say(model, tmp_path, eval_steps):
    more = {"eval_dataset": Rows()}
    trainer = theirs(model, tmp_path, more=more, eval_strategy="steps", eval_steps=eval_steps)
    ours = sailor.from_transformers(trainer)
    ours.train()
    assert list(ours.evaluations) == [1, 2], "also the last step"


class Endless(torch.utils.data.IterableDataset):
    """The rows, over and over."""

    def __iter__(self):
        rows = Rows()
        while True:
            yield from (rows[index] for index in range(12))


def test_samples_without_numbers_are_given_as_a_stream(model, tmp_path):
    def made(**more):
        trainer = theirs(model, tmp_path, max_steps=3, train_sampling_strategy="random")
        trainer.train_dataset = Endless()
        return sailor.from_transformers(trainer, **more)

    with pytest.raises(InputError, match=r"train_dataset: is a Endless.*dataset=sailor\.Stream"):
        made()
    ours = made(dataset=sailor.Stream(Endless()))
    ours.train()
    wanted = sailor.from_transformers(theirs(model, tmp_path))
    wanted.train()
    assert [each.loss for each in ours.history] == [each.loss for each in wanted.history]


def test_batches_of_transformers_keep_their_class_on_a_device():
    """Their code reads entries as attributes."""
    given = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2)}
    output = transformers.modeling_outputs.SequenceClassifierOutput(
        loss=torch.ones(2), logits=torch.ones(2, 3)
    )
    about = {"of_module": True, "dtype": torch.bfloat16, "device": torch.device("meta")}
    for batch in (transformers.BatchEncoding(given), transformers.BatchFeature(given), output):
        moved = batch_on_device(batch, **about)
        assert type(moved) is type(batch)
        assert {each.device.type for each in moved.values()} == {"meta"}
    assert moved.logits.device.type == "meta"
    moved = batch_on_device(transformers.BatchEncoding(given), **about)
    assert (moved.input_ids.dtype, moved.labels.dtype) == (torch.bfloat16, torch.float32)
