"""Where a script's figures go: JSON lines, TensorBoard, Weights & Biases, MLflow.

A logger opens what it writes to at its first figure. Only one rank logs; after a change of plan it
may be another one, on another node, so folders should be shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Takes the figures of steps and evaluations."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""


class JsonLines:
    """Appends one JSON object for each step to a file; ``null``: not finite."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
            file.write(json.dumps({"step": step, **finite}) + "\n")


class TensorBoard:
    """Writes event files for TensorBoard, by the package ``tensorboard``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional package

            self._writer = SummaryWriter(self.folder)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandB:
    """Logs to Weights & Biases, by the package ``wandb``; takes ``wandb.init``'s arguments.

    Give an ``id``, so that a rank on another node resumes the run.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._run is None:
            import wandb  # noqa: PLC0415 - an optional package

            self._run = wandb.init(**{"resume": "allow", **self.settings})
        self._run.log(dict(values), step=step)


class MLflow:
    """Logs to a run of MLflow, by the package ``mlflow``; takes ``mlflow.start_run``'s arguments.

    Give a ``run_id``, so that a rank on another node resumes the run.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._mlflow: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._mlflow is None:
            import mlflow  # noqa: PLC0415 - an optional package

            mlflow.start_run(**self.settings)
            self._mlflow = mlflow
        self._mlflow.log_metrics(dict(values), step=step)
