"""Reads job files (TOML)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from simulator.documents.fields import (
    InvalidValue,
    Table,
    open_table,
    quote,
    valid_integer,
    valid_timestamp,
)
from simulator.documents.files import Document, load_document
from simulator.documents.problems import Problems
from simulator.hardware.runtime_constants import RUNTIMES
from simulator.inputs.model_section import TrainingSettings, model_tp_problem, read_model
from simulator.inputs.plan_file import zero_stage
from simulator.inputs.work_section import read_work
from simulator.models.layers import PRECISIONS, Model
from simulator.spec.job import (
    Allowed,
    Checkpoint,
    Data,
    DataKind,
    Engine,
    Goal,
    Job,
    Objective,
    Optimizer,
    Preference,
    RateSchedule,
    RecomputePolicy,
    UpdateSettings,
)

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
POLICIES: tuple[RecomputePolicy, ...] = get_args(RecomputePolicy)
GOALS: tuple[Goal, ...] = get_args(Goal)
PREFERENCES: tuple[Preference, ...] = get_args(Preference)
ALLOWED: tuple[Allowed, ...] = get_args(Allowed)
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)
GRADIENT_SYNCS: tuple[Literal["overlap", "serial"], ...] = ("overlap", "serial")
RATE_SCHEDULES: tuple[RateSchedule, ...] = get_args(RateSchedule)
SURVIVES: tuple[Literal["node", "zone"], ...] = ("node", "zone")
ENGINES: tuple[Engine, ...] = get_args(Engine)
SOFTMAXES: tuple[Literal["fused", "fp32"], ...] = ("fused", "fp32")

T = TypeVar("T")


def load_job(path: Path | str) -> Job:
    """Read a job file, and the model file that it names, if any."""
    return job_from_document(load_document(path, flaws_raise=False))


def job_from_document(document: Document, *, undescribed: Model | None = None) -> Job:
    """Read a job; a model file that it names is relative to the document's folder.

    ``undescribed`` stands for a model that the job names by ``hf`` and that is described later.
    """
    problems = Problems()
    top = open_table(document, problems)
    name = _name(top.section("job"), document)
    training = top.section("training")
    read = _training(training)
    model, named = _model(top, read, undescribed)
    if model is not None and model is not undescribed:
        _check_fit(training, model, read)
    training.finish()
    objective = _objective(top.section("objective"))
    source = top.section("data")
    work = read_work(top, source)
    data = _data(source)
    checkpoint = _checkpoint(top.section("checkpoint"))
    if work is not None and work.package and named.get("script") is None:
        top.report("work", "is given without a script", 'name it under [model]: script = "..."')
    top.finish()
    problems.raise_if_any()
    assert model is not None, "a model that cannot be built has a problem"
    return Job(
        name=name,
        model=model,
        objective=objective,
        data=data,
        checkpoint=checkpoint,
        work=work,
        **named,
        **read,
    )


def _name(table: Table, document: Document) -> str:
    name = table.text("name", default=Path(document.name).stem or "job")
    table.finish()
    return name


def _model(
    top: Table, training: dict[str, Any], undescribed: Model | None
) -> tuple[Model | None, dict[str, Any]]:
    table = top.table("model", required=True)
    if table is None:
        return None, {}
    named = {key: table.text(key) for key in ("profile", "script", "hf", "weights")}
    shaping = TrainingSettings(
        sequence=training["sequence"],
        dropout=training["dropout"] > 0,
        runtime=training["runtime"],
        softmax=training.pop("softmax"),
    )
    model = read_model(table, shaping, undescribed)
    table.finish()
    return model, named


def _check_fit(table: Table, model: Model, training: Mapping[str, Any]) -> None:
    """Check that the model supports the job's largest TP degree, engine and sequence length."""
    unfit = model_tp_problem(model, training["max_tp"])
    if unfit is not None:
        table.report("max_tp", unfit.what, unfit.cure)
    if training["engine"] == "deepspeed" and model.family == "exact":
        what = 'is "deepspeed", which cannot compute a model of the family "exact"'
        table.report("engine", what, 'give "sailor", or another family')
    if training["sequence"] is not None:
        place = table.place_of("sequence")
        found = model.problems_with_sequence(training["sequence"], place=place)
        table.problems.found.extend(found)


def _training(table: Table) -> dict[str, Any]:
    """Read [training] into a dict by the names of ``Job``'s fields."""
    global_batch = table.integer("global_batch", required=True)
    micro_batches = table.integers("micro_batches")
    _check_micro_batches(table, micro_batches, global_batch)
    runtime = table.choice("runtime", tuple(RUNTIMES), default="sailor")
    return {
        "global_batch": global_batch,
        "sequence": table.integer("sequence", required=True),
        "precision": table.choice("precision", PRECISIONS, default="bf16"),
        "optimizer": table.choice("optimizer", OPTIMIZERS, default="adamw"),
        "recompute": table.choice("recompute", POLICIES, default="none"),
        "max_tp": table.integer("max_tp", default=1),
        "micro_batches": micro_batches,
        "flash_attention": table.flag("flash_attention", default=True),
        "zero": table.value("zero", zero_stage, default=0),
        "gradient_sync": table.choice("gradient_sync", GRADIENT_SYNCS, default="overlap"),
        "steps": table.integer("steps"),
        "learning_rate": table.number("learning_rate", default=3e-4, above=0),
        "learning_rate_min": table.number("learning_rate_min", default=0.0, least=0),
        "update": UpdateSettings(
            betas=table.value("betas", _betas, default=(0.9, 0.999)),
            epsilon=table.number("epsilon", default=1e-8, above=0),
            weight_decay=table.number("weight_decay", least=0),
            momentum=table.number("momentum", default=0.9, least=0, below=1),
            nesterov=table.flag("nesterov", default=False),
        ),
        "schedule": table.choice("schedule", RATE_SCHEDULES, default="constant"),
        "warmup_steps": table.integer("warmup_steps", default=0, least=0),
        "clip_norm": table.number("clip_norm", above=0),
        "skip_nonfinite": table.integer("skip_nonfinite", default=3, least=0),
        "dropout": table.number("dropout", default=0.0, least=0, below=1),
        "engine": table.choice("engine", ENGINES, default="sailor"),
        "runtime": runtime,
        "softmax": _foreign(table, "softmax", runtime, lambda: table.choice("softmax", SOFTMAXES)),
        "gradient_bytes": _foreign(
            table, "gradient_bytes", runtime, lambda: table.value("gradient_bytes", _two_or_four)
        ),
    }


def _foreign(table: Table, key: str, runtime: str, read: Callable[[], T]) -> T | None:
    """Read a key that describes another runtime; Sailor's own runtime leaves no choice there."""
    if key not in table:
        return None
    if runtime == "sailor":
        what = "is given, but Sailor's own runtime decides that"
        table.report(key, what, 'leave it out, or give runtime = "megatron-deepspeed"')
    return read()


def _two_or_four(value: Any) -> int:
    if value not in (2, 4) or isinstance(value, bool):
        raise InvalidValue(f"is {quote(value)}", "give 2 (16-bit gradients) or 4 (fp32)")
    return int(value)


def _check_micro_batches(
    table: Table, sizes: tuple[int, ...] | None, global_batch: int | None
) -> None:
    if sizes is None:
        return
    if len(set(sizes)) != len(sizes):
        table.report("micro_batches", f"is {quote(list(sizes))}", "name each size once")
    if global_batch is not None and all(global_batch % size for size in sizes):
        table.report(
            "micro_batches",
            f"holds no size that divides the global batch of {global_batch}",
            "add one that does, such as 1",
        )


def _betas(value: Any) -> tuple[float, float]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value)
        or not all(0 <= each < 1 for each in value)
    ):
        raise InvalidValue(f"is {quote(value)}", "give two numbers below 1, such as [0.9, 0.95]")
    return float(value[0]), float(value[1])


def _objective(table: Table) -> Objective:
    objective = Objective(
        goal=table.choice("goal", GOALS, default="throughput"),
        max_usd_per_iteration=table.number("max_usd_per_iteration", above=0),
        max_usd_per_hour=table.number("max_usd_per_hour", above=0),
        max_usd_total=table.number("max_usd_total", above=0),
        min_iterations_per_s=table.number("min_iterations_per_s", above=0),
        deadline=table.value("deadline", valid_timestamp),
        max_spot_share=table.number("max_spot_share", least=0, most=1),
        prefer=table.choice("prefer", PREFERENCES, default="simple"),
        allow=table.choices("allow", ALLOWED),
    )
    table.finish()
    return objective


def _data(table: Table) -> Data:
    tokens, images, labels = (table.text(key) for key in ("tokens", "images", "labels"))
    given = [kind for kind in DATA_KINDS if kind != "synthetic" and kind in table]
    meant: DataKind = given[0] if given else "synthetic"
    kind = table.choice("kind", DATA_KINDS, default=meant)
    if len(given) > 1:
        table.report("tokens", "is given together with images", "keep one of the two")
    elif kind != "synthetic" and not given:
        table.report(kind, f'is missing, and kind is "{kind}"', f"name the file of {kind}")
    elif kind != meant:
        table.report("kind", f'is "{kind}", but {meant} is given', "keep one of the two")
    if "labels" in table and "images" not in table:
        table.report("labels", "is given without images", "name the array of images too")
    data = Data(
        kind=kind,
        seed=table.integer("seed", default=0, least=0),
        tokens=tokens,
        images=images,
        labels=labels,
        samples=table.integers("samples"),
        num_workers=table.integer("num_workers", default=0, least=0, most=256),
    )
    table.finish()
    return data


def _checkpoint(table: Table) -> Checkpoint:
    checkpoint = Checkpoint(
        uri=table.text("uri"),
        memory_every=table.value("memory_every", _interval, default="auto"),
        persist_every=table.value("persist_every", _interval, default="auto"),
        keep=table.integer("keep", default=3),
        survive=table.choice("survive", SURVIVES, default="node"),
        compare_every=table.integer("compare_every", default=20, least=0),
        start_over=table.flag("start_over", default=False),
    )
    table.finish()
    return checkpoint


def _interval(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return valid_integer(value, 1, None)
    except InvalidValue:
        raise InvalidValue(f"is {quote(value)}", 'give a number of steps or "auto"') from None
