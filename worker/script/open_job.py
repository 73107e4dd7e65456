"""Opens a job with the module that it trains, whether it is a script or a job file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document
from simulator.spec.job import Job
from worker.script.hf_job import described_job, hf_recipe, names_hf
from worker.script.load import load_script
from worker.script.recipe import Recipe


def names_module(path: Path) -> bool:
    """Return whether a job trains a module by its own code: of a script, or of transformers."""
    if path.suffix == ".py":
        return True
    model = load_document(path, flaws_raise=False).data.get("model")
    return isinstance(model, dict) and bool(model.keys() & {"hf", "script"})


def open_job(path: Path, arguments: Sequence[str] = ()) -> tuple[Job, Recipe]:
    """Open a job with its module, and describe it if that is still to be done."""
    if path.suffix == ".py":
        recipe = load_script(path, arguments)
        return recipe.job(), recipe
    document = load_document(path, flaws_raise=False)
    if names_hf(document):
        return described_job(document)
    job = job_from_document(document)
    return job, open_module(path, job)


def open_module(path: Path, job: Job, arguments: Sequence[str] = ()) -> Recipe:
    """Open the module of a job that ``open_job`` has read."""
    if path.suffix == ".py":
        script = load_script(path, arguments)
        check_job(script, job)
        return script
    recipe = recipe_of(job, path.parent)
    assert recipe is not None, "the job names a module"
    return recipe


def open_saved_module(path: Path, job: Job, arguments: Sequence[str] = ()) -> Recipe:
    """Open the module of a checkpoint; of the settings of ``job`` only the tensors count."""
    if path.suffix == ".py":
        recipe = load_script(path, arguments)
    elif job.hf is not None:
        recipe = hf_recipe(job, path.parent)
    elif job.script is not None:
        recipe = load_script(path.parent / job.script, arguments)
    else:
        what = "is given, but the checkpoint is of a built-in model"
        raise InputError(Problem(str(path), what, "leave --job out"))
    _refuse_first("model", _differing_tensors(recipe, job))
    return recipe


def recipe_of(job: Job, base: Path) -> Recipe | None:
    """Open the module of a described job; relative names are looked up in ``base``."""
    if job.hf is not None:
        recipe = hf_recipe(job, base)
        _refuse_first("model", _differing_tensors(recipe, job))
        return recipe
    if job.script is None:
        return None
    # A packed script lies in the work folder, which this process has entered.
    folder, arguments = (base, ()) if job.work is None else (Path(), job.work.arguments)
    recipe = load_script(folder / job.script, arguments)
    check_job(recipe, job)
    return recipe


def check_job(recipe: Recipe, job: Job) -> None:
    """Refuse to train a job whose settings this process's script would not give again."""
    _refuse_first("script", _differences(recipe, job))


def _refuse_first(place: str, differences: Iterator[tuple[str, object]]) -> None:
    for here, described in differences:
        what = f"{here} here, and {described} in the described job"
        cure = "do not compute it from the machine, the time or random numbers; use equal files"
        raise InputError(Problem(place, what, cure))


def _differences(recipe: Recipe, job: Job) -> Iterator[tuple[str, object]]:
    settings = recipe.settings
    both = {
        "batch_size": (recipe.batch_size, job.global_batch),
        "steps": (recipe.steps, job.steps),
        "seed": (recipe.seed, job.data.seed),
        "precision": (recipe.precision, job.precision),
        "clip_norm": (recipe.clip_norm, job.clip_norm),
        "skip_nonfinite": (recipe.skip_nonfinite, job.skip_nonfinite),
        "optimizer": (settings.optimizer, job.optimizer),
        "learning rate": (settings.learning_rate, job.learning_rate),
        "update": (settings.update, job.update),
    }
    yield from ((f"{name} is {one}", other) for name, (one, other) in both.items() if one != other)
    yield from _differing_tensors(recipe, job)


def _differing_tensors(recipe: Recipe, job: Job) -> Iterator[tuple[str, str]]:
    """Find parameters that are not as described: a rank would fill up rows with zeros."""
    cut, layers = recipe.cut, job.model.layers
    if cut.layers != len(layers):
        yield f"its number of layers is {cut.layers}", f"{len(layers)}"
    here = {
        (layer, cut.local_name(name)): (tuple(recipe.value(name).shape), recipe.is_trained(name))
        for name, layer in cut.layer_of.items()
    }
    described = {
        (index, tensor.name): (tensor.shape, not tensor.frozen)
        for index, layer in enumerate(layers)
        for tensor in layer.tensors
        if tensor.tied_to is None
    }
    for layer, name in sorted(here.keys() | described.keys()):
        one, other = (found.get((layer, name)) for found in (here, described))
        if one != other:
            yield f"{cut.layer_name(layer)} has {name} {_tensor(one)}", _tensor(other)


def _tensor(found: tuple[tuple[int, ...], bool] | None) -> str:
    if found is None:
        return "not at all"
    shape, is_trained = found
    return f"of shape {list(shape)} ({'trained' if is_trained else 'frozen'})"
