"""The command ``profile``: measures a job's layers and keeps the result in a profile file."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.inputs.job_file import load_job
from simulator.layer_costs.profile import Profile, profile_name
from simulator.layer_costs.profile_file import profile_to_json, read_profile
from simulator.spec.job import Job
from worker.atomic_file import replace_file
from worker.cli.own_output import printing_to_stderr
from worker.layer_profiles.device import Device, open_device
from worker.layer_profiles.device_users import why_busy
from worker.layer_profiles.measure import LayerFigures
from worker.layer_profiles.profile_job import Request, profile_job
from worker.script.open_job import names_module, open_job
from worker.script.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options of ``python -m worker profile``."""

    job: Path
    tp: tuple[int, ...]
    micro_batches: tuple[int, ...]
    out: Path
    name: str | None
    device: str | None
    kind: str | None
    catalogue: Path | None
    budget: float
    threads: int | None
    force: bool
    arguments: tuple[str, ...] = ()


def profile(options: ProfileOptions) -> None:
    """Measure, merge with what the file has, and write it."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    catalogue = load_catalogue(options.catalogue)
    device = open_device(options.device, options.kind, catalogue)
    busy = "" if options.force else why_busy(device.place)
    if busy:
        cure = "stop it (sailorctl drain moves a job away), or give --force"
        raise InputError(Problem(device.name, f"is in use by {busy}", cure))
    with printing_to_stderr():
        job, recipe = _open(options)
    name = options.name or job.profile or profile_name(job.model.name)
    if name != profile_name(name):
        cure = f"use letters, digits, dots and dashes, such as {profile_name(name)}"
        raise InputError(Problem("--name", f"{name!r} is not the name of a file", cure))
    path = options.out / f"profiles_{name}.json"
    before = _read_present(path, catalogue)
    request = Request(
        tp=options.tp,
        micro_batches=options.micro_batches,
        budget_s=options.budget,
        name=name,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    progress = ProgressLine(is_terminal=sys.stderr.isatty())
    if before is not None:
        # Fail now rather than after minutes of measuring.
        before.merged_with(_empty_like(before, job, name), place=str(path))
    with printing_to_stderr():
        found = profile_job(job, recipe, request, device, progress, now=time.monotonic)
    whole = found if before is None else before.merged_with(found, place=str(path))
    _write(path, whole)
    print(f"{path}: {_summary(found, device)}")
    is_found = name == (job.profile or profile_name(job.model.name))
    line = "" if is_found else f' and profile = "{name}" in [model]'
    print(f"to plan with it: --profiles {options.out}{line}")


def _open(options: ProfileOptions) -> tuple[Job, Recipe | None]:
    if names_module(options.job):
        return open_job(options.job, options.arguments)
    if options.arguments:
        cure = "leave them out; only a script takes arguments"
        raise InputError(Problem(str(options.job), "is a job file, and arguments are given", cure))
    job = load_job(options.job)
    if job.model.architecture is None:
        what = "has only a description of its model, which no code computes"
        raise InputError(Problem(str(options.job), what, "profile the script that it describes"))
    return job, None


def _read_present(path: Path, catalogue: Catalogue) -> Profile | None:
    if not path.parent.is_dir():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot be made: {error.strerror or error}"
            raise InputError(Problem(str(path.parent), what, "name another folder")) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        what = "cannot be written: Permission denied"
        raise InputError(Problem(str(path.parent), what, "name another folder"))
    if not path.exists():
        return None
    return read_profile(load_document(path), catalogue=catalogue)


def _empty_like(before: Profile, job: Job, name: str) -> Profile:
    return Profile(
        name=name,
        sequence=job.model.tokens_of(job.sequence),
        precision=job.precision,
        layer_names=tuple(layer.name for layer in job.model.layers),
        timings={},
        sizes={},
        optimizer_parameters={},
        config=before.config,
        flash_attention=job.uses_flash,
        fingerprint=job.model.fingerprint,
    )


def _write(path: Path, profile: Profile) -> None:
    text = json.dumps(profile_to_json(profile), indent=1, allow_nan=False)
    replace_file(path, f"{text}\n")


def _summary(found: Profile, device: Device) -> str:
    degrees = ", ".join(map(str, sorted({tp for _, tp, _ in found.timings})))
    sizes = ", ".join(map(str, sorted({size for _, _, size in found.timings})))
    worst = max(timing.relative_error for timing in found.timings.values())
    return (
        f"{device.kind} TP {degrees}, micro batches {sizes}, spread at most {worst:.1%}"
        f" ({device.name})"
    )


@dataclass(slots=True)
class ProgressLine:
    """Prints a line for each micro batch; on a terminal also how far the present one is."""

    is_terminal: bool
    _begun_s: float = field(default_factory=time.monotonic)

    def sampling(self, what: str, samples: int) -> None:
        """Show one more round."""
        if self.is_terminal:
            print(f"\r{what}: {samples} rounds\033[K", end="", file=sys.stderr, flush=True)

    def finished(self, what: str, figures: LayerFigures) -> None:
        """Print what was measured."""
        total = sum(figures.forward_s) + sum(figures.backward_s)
        self._line(
            f"{what}: {total * 1e3:.2f} ms for {len(figures.forward_s)} distinct layers,"
            f" spread {figures.spread:.1%}, {figures.samples} rounds"
        )

    def ended(self, what: str, why: str) -> None:
        """Print why larger ones are not measured."""
        self._line(f"{what} {why}")

    def _line(self, text: str) -> None:
        begin = "\r" if self.is_terminal else ""
        end = "\033[K\n" if self.is_terminal else "\n"
        seconds = time.monotonic() - self._begun_s
        print(f"{begin}{seconds:6.1f} s  {text}", end=end, file=sys.stderr, flush=True)
