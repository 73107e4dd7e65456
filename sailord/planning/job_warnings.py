"""Warns about a submitted job: files that each node looks up, dropout, and a model too large."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simulator.cluster.cluster_file import load_cluster
from simulator.documents.problems import InputError
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.spec.job import Job


def warnings_of(job: Job) -> tuple[str, ...]:
    """One sentence for each file that the job names by a relative path outside of its mounts, and
    one for dropout that makes attention slow.

    These are warnings, not errors: only the nodes must have the files. A relative name is resolved
    by each agent, while ``python -m worker run`` resolves it beside the job's file.
    """
    named = {
        "[data] tokens": job.data.tokens,
        "[data] images": job.data.images,
        "[data] labels": job.data.labels,
        "[model] weights": job.weights,
        "[model] hf": job.hf,
    }
    found = {
        key: name
        for key, name in named.items()
        if name and not (job.work is not None and job.work.has_mounted(name))
    }
    files = (f"{key}: {name} {why}" for key, name in found.items() if (why := _warning(name)))
    return (*files, *_dropout_warnings(job))


def _dropout_warnings(job: Job) -> tuple[str, ...]:
    if not job.flash_attention or job.uses_flash or job.script is not None or job.hf is not None:
        return ()
    return (
        f"[training] dropout: {job.dropout:g} switches flash attention off, as dropout needs the"
        " scores: time and memory grow with the square of the sequence, and plans count that; a"
        " rate of 0 avoids it",
    )


def _warning(name: str) -> str:
    # Do not tell people who submit jobs which absolute paths exist on sailord's host.
    if not Path(name).is_absolute():
        return "is relative: each agent resolves it in the data folder of its configuration"
    return ""


def size_warnings(job: Job, gpus: Mapping[str, int], cluster_file: Path) -> tuple[str, ...]:
    """Return whether the model's state alone is too large for all ``gpus``, counted by kind."""
    try:
        known = load_cluster(cluster_file).catalogue
        there = sum(known.gpu(gpu).usable_memory_bytes * count for gpu, count in gpus.items())
    except InputError:
        return ()  # The planner tells what is wrong with the file, or with a node's kind.
    state = job.model.parameters * state_bytes_per_parameter(job)
    if not there or state <= there:
        return ()
    return (
        f"[model] is too large for the {sum(gpus.values())} GPUs that are there: its weights,"
        f" gradients and optimizer states alone take {state / 1e9:,.4g} GB, and these GPUs have"
        f" {there / 1e9:,.4g} GB together; it waits until there are more",
    )
