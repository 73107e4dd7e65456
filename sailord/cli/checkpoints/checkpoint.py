"""The group ``checkpoint``: its commands, which are imported when they run."""

from __future__ import annotations

import click

from sailord.cli.shared.lazy_group import LazyGroup, Sections

SECTIONS: Sections = {
    "Of the running cluster": {
        "ls": ("checkpoints.orders", "List a job's checkpoints."),
        "now": ("checkpoints.orders", "Make a durable checkpoint now, regardless of the interval."),
        "pin": ("checkpoints.orders", "Keep a checkpoint, whatever the retention says."),
        "unpin": ("checkpoints.orders", "Leave a checkpoint to the retention again."),
        "rollback": (
            "checkpoints.orders",
            "Roll a job back to an older checkpoint; later steps are discarded.",
        ),
    },
    "Of the storage": {
        "verify": ("checkpoints.stored", "Verify every byte of a checkpoint."),
        "export": ("checkpoints.stored", "Convert a checkpoint for other programs."),
        "import": (
            "checkpoints.stored:import_checkpoint",
            "Import a checkpoint of another program into the storage of a job.",
        ),
    },
}


@click.group(cls=LazyGroup, sections=SECTIONS)
def checkpoint() -> None:
    """List, make, verify, pin and export checkpoints, and roll back.

    A checkpoint is named by its JOB and its STEP, as `ls` prints them.
    """
