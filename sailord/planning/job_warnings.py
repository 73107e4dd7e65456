"""What of a submitted job cannot be seen from here, and may be missing where its workers look."""

from __future__ import annotations

from pathlib import Path

from simulator.spec.job import Job


def doubts(job: Job) -> tuple[str, ...]:
    """A sentence for each file that the job names and that may not be found.

    Only the nodes know what they hold, so that none of this is a mistake: a file that is missing
    here may be there, and the other way round. A name that is relative means something only to
    an agent, unlike for ``python -m worker run``, where it is looked up beside the job's file.
    """
    named = {
        "[data] tokens": job.data.tokens,
        "[data] images": job.data.images,
        "[data] labels": job.data.labels,
        "[model] weights": job.weights,
    }
    return tuple(
        f"{key}: {name} {why}" for key, name in named.items() if name and (why := _doubt(name))
    )


def _doubt(name: str) -> str:
    path = Path(name)
    if not path.is_absolute():
        return (
            "is looked up on each node in the folder that its agent's configuration names as data"
        )
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no path"
        return f"is not to be seen from sailord's machine ({why}); each node must have it there"
    return ""
