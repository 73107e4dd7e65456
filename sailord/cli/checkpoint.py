"""The group ``checkpoint``: its commands, which are imported when they run."""

from __future__ import annotations

import click

from sailord.cli.lazy_group import LazyGroup, Sections

SECTIONS: Sections = {
    "Of the running cluster": {
        "ls": ("checkpoint_orders", "List a job's checkpoints."),
        "now": ("checkpoint_orders", "Make a durable checkpoint now, regardless of the interval."),
        "pin": ("checkpoint_orders", "Keep a checkpoint, whatever the retention says."),
        "unpin": ("checkpoint_orders", "Leave a checkpoint to the retention again."),
        "rollback": (
            "checkpoint_orders",
            "Roll a job back to an older checkpoint; later steps are discarded.",
        ),
    },
    "Of the storage": {
        "verify": ("stored_checkpoint", "Verify every byte of a checkpoint."),
        "export": ("stored_checkpoint", "Convert a checkpoint for other programs."),
        "import": (
            "stored_checkpoint:import_checkpoint",
            "Import a checkpoint of another program into the storage of a job.",
        ),
    },
}


@click.group(cls=LazyGroup, sections=SECTIONS)
def checkpoint() -> None:
    """List, make, verify, pin and export checkpoints, and roll back.

    A checkpoint is named by its JOB and its STEP, as `ls` prints them.
    """
