"""Warns about files of a submitted job that each node looks up in its own data folder."""

from __future__ import annotations

from pathlib import Path

from simulator.spec.job import Job


def warnings_of(job: Job) -> tuple[str, ...]:
    """One sentence for each file that the job names by a relative path.

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
    return tuple(
        f"{key}: {name} {why}" for key, name in named.items() if name and (why := _warning(name))
    )


def _warning(name: str) -> str:
    # Do not tell people who submit jobs which absolute paths exist on sailord's host.
    if not Path(name).is_absolute():
        return "is relative: each agent resolves it in the data folder of its configuration"
    return ""
