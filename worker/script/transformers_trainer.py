"""Takes over what a ``Trainer`` of transformers was given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from simulator.documents.problems import InputError, Problem
from simulator.models.layers import Precision
from worker.data.datasets.blend import Blend
from worker.data.datasets.stream import Stream
from worker.reporting.loggers import Logger, MLflow, TensorBoard, WandB
from worker.script.loader_parts import data_of
from worker.script.losses import default_loss
from worker.script.script_trainer import Trainer, steps_of

_PLACE = "transformers.Trainer"
_NOT_SUPPORTED = {
    "neftune_noise_alpha": "leave it out",
    "optim_target_modules": "leave it out",
    "load_best_model_at_end": "leave it out: every checkpoint is kept by its step",
    "resume_from_checkpoint": "leave it out: under sailord a job resumes by itself",
    "auto_find_batch_size": "leave it out: the plan decides the size of micro batches",
    "torch_compile": "leave it out",
    "eval_on_start": "leave it out: the first evaluation is after eval_steps",
    "eval_delay": "leave it out: the first evaluation is after eval_steps",
    "dataloader_drop_last": "leave it out, and give max_steps: batches go on into the next epoch",
    "deepspeed": "leave it out: the plan decides how states are sharded",
    "fsdp": "leave it out: the plan decides how states are sharded",
}
"""Arguments that would be ignored silently, and the cure."""
_OVERRIDES = ("compute_loss", "training_step", "get_train_dataloader", "prediction_step")
_OWN_CALLBACKS = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback")
"""Callbacks that every trainer has; loggers are taken from ``report_to``."""
_LOGGERS = ("tensorboard", "wandb", "mlflow")


def from_transformers(trainer: Any, *, batch_size: int | None = None, **more: Any) -> Trainer:
    """Return a trainer with the model, data, optimizer and arguments of a ``transformers.Trainer``.

    ``batch_size`` is the global batch; by default that of one process: the size per device times
    the accumulated steps. ``more`` are arguments of ``sailor.Trainer`` that replace what was found;
    another ``dataset``, such as a ``Stream``, keeps the trainer's collator.
    """
    problems = list(_problems(trainer, more))
    if problems:
        raise InputError(problems)
    args = trainer.args
    trainer.model.train()  # As transformers does before each step.
    data: Any = more.pop("dataset", None)
    if data is None:
        data = loader = trainer.get_train_dataloader()
        data_of(loader, "train_dataset")  # Refuses an unknown sampler by the name given there.
        samples: int | None = len(loader.dataset)
    else:
        more = {"collate": trainer.data_collator, **more}
        samples = None if isinstance(data, Blend | Stream) else len(data)
    evaluated = None if trainer.eval_dataset is None else trainer.get_eval_dataloader()
    # Not args.train_batch_size, which depends on the GPUs of the machine.
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps
    batch_size = batch_size or own
    # The schedule is made for the steps that are trained.
    steps = more.get("steps", args.max_steps)
    if "steps" not in more and ("epochs" in more or steps <= 0):
        if samples is None:
            cure = "give max_steps in TrainingArguments, or steps="
            raise InputError(Problem("dataset", f"is a {type(data).__name__} without epochs", cure))
        epochs = more.pop("epochs", args.num_train_epochs)
        steps = steps_of(epochs, samples, batch_size)
    trainer.create_optimizer_and_scheduler(steps)
    precision: Precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    settings = {
        "batch_size": batch_size,
        "steps": steps,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "eval_dataset": evaluated,
        "eval_every": _eval_every(args, steps, math.ceil((samples or 0) / batch_size) or None),
        "loggers": list(_loggers(args)),
        "precision": precision,
        "recompute": "full" if _checkpoints(args) else "auto",
        "clip_norm": args.max_grad_norm if (args.max_grad_norm or 0) > 0 else None,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    if args.label_smoothing_factor and "loss" not in more:
        settings["loss"] = default_loss(trainer.model, smoothing=args.label_smoothing_factor)
    return Trainer(trainer.model, data, **{**settings, **more})


def _problems(trainer: Any, more: dict[str, Any]) -> Iterator[Problem]:
    import transformers  # noqa: PLC0415 - an optional package

    if isinstance(trainer.train_dataset, IterableDataset) and "dataset" not in more:
        what = f"is a {type(trainer.train_dataset).__name__}, whose samples have no numbers"
        cure = "give dataset=sailor.Stream(lambda n: DATA.skip(n)) to from_transformers, too"
        yield Problem("train_dataset", what, cure)

    for name, cure in _NOT_SUPPORTED.items():
        if getattr(trainer.args, name, None):
            yield Problem(_PLACE, f"sets {name}, which is not supported", cure)
    for name in _OVERRIDES:
        theirs = getattr(transformers.Trainer, name)
        if getattr(type(trainer), name, theirs) is not theirs:
            what = f"overrides {name}, which Sailor does not call"
            yield Problem(_PLACE, what, "give sailor.Trainer the loss and the data set themselves")
    if isinstance(trainer.eval_dataset, dict):
        yield Problem(_PLACE, "has several eval data sets", "give one, by eval_dataset=")
    names = trainer.args.label_names
    if names not in (None, ["labels"]) and "loss" not in more:
        what = f"has labels of other names: {', '.join(names)}"
        yield Problem(_PLACE, what, "give loss=, a function of output and batch")
    if trainer.compute_loss_func is not None and "loss" not in more:
        cure = "give loss=, a function of output and batch"
        yield Problem(_PLACE, "has a compute_loss_func, which Sailor does not call", cure)
    if trainer.compute_metrics is not None and "metrics" not in more:
        cure = "give metrics=, functions of output and batch by name, or leave it out"
        yield Problem(_PLACE, "has compute_metrics, which wants all predictions at once", cure)
    unknown = sorted({*(trainer.args.report_to or [])} - {*_LOGGERS, "none"})
    if unknown and "loggers" not in more:
        cure = "report to tensorboard, wandb or mlflow, or give loggers=, your own among them"
        yield Problem(_PLACE, f"reports to {', '.join(unknown)}, which Sailor does not know", cure)
    own = [
        type(each).__name__
        for each in trainer.callback_handler.callbacks
        if type(each).__name__ not in _OWN_CALLBACKS
        and not type(each).__module__.startswith("transformers.integrations")
    ]
    if own and "callbacks" not in more:
        cure = "give callbacks=, functions of step and figures, or leave them out"
        yield Problem(_PLACE, f"has callbacks that Sailor does not call: {', '.join(own)}", cure)


def _checkpoints(args: Any) -> bool:
    """Return whether activations are recomputed, by the argument's newer or older name."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return any(getattr(args, name, None) for name in names)


def _eval_every(args: Any, steps: int, steps_of_epoch: int | None) -> int | None:
    """Return after how many steps to evaluate; ``None``: after the last."""
    if args.eval_strategy == "steps":
        every = args.eval_steps or args.logging_steps
        # A number below 1 is a share of all steps.
        return math.ceil(every * steps) if every < 1 else int(every)
    return steps_of_epoch if args.eval_strategy == "epoch" else None


def _loggers(args: Any) -> Iterator[Logger]:
    """Return those that ``report_to`` names and Sailor has."""
    wanted = args.report_to or []
    if "tensorboard" in wanted:
        yield TensorBoard(args.output_dir)
    if "wandb" in wanted:
        yield WandB(name=args.run_name)
    if "mlflow" in wanted:
        yield MLflow()
