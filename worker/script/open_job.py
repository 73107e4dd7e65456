"""Opens a job with the module that it trains, whether it is a script or a job file."""

from __future__ import annotations

from collections.abc import Sequence
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


def recipe_of(job: Job, base: Path) -> Recipe | None:
    """Open the module of a described job; relative names are looked up in ``base``."""
    if job.hf is not None:
        return hf_recipe(job, base)
    if job.script is None:
        return None
    # A packed script lies in the work folder, which this process has entered.
    folder, arguments = (base, ()) if job.work is None else (Path(), job.work.arguments)
    recipe = load_script(folder / job.script, arguments)
    check_job(recipe, job)
    return recipe


def check_job(recipe: Recipe, job: Job) -> None:
    """Refuse to train a job whose settings this process's script would not give again."""
    settings = recipe.settings
    mine = {
        "batch_size": (recipe.batch_size, job.global_batch),
        "steps": (recipe.steps, job.steps),
        "seed": (recipe.seed, job.data.seed),
        "precision": (recipe.precision, job.precision),
        "clip_norm": (recipe.clip_norm, job.clip_norm),
        "optimizer": (settings.optimizer, job.optimizer),
        "learning rate": (settings.learning_rate, job.learning_rate),
    }
    for name, (here, described) in mine.items():
        if here != described:
            what = f"{name} is {here} here and {described} in the described job"
            cure = "do not compute it from the machine, the time or random numbers"
            raise InputError(Problem("script", what, cure))
