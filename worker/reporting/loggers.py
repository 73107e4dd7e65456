"""Where a script's figures go: JSON lines, TensorBoard, Weights & Biases, MLflow.

A logger opens what it writes to at its first figure. Only one rank logs; after a change of plan it
may be another one, on another node, so folders should be shared.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

LINE_MAX = 300
"""Characters of what the job's history says of a failed logger."""
CLOSE_S = 10.0
"""How long a training that has ended waits for its loggers."""


class Logger(Protocol):
    """Takes the figures of steps and evaluations; a method ``close``, if any, is called last."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""


def log_to_all(
    loggers: Sequence[Logger], step: int, values: Mapping[str, float], *, failed: dict[int, str]
) -> None:
    """Hand the figures of a step to all loggers but those that failed before.

    ``failed`` says in a line why each is not used any more, by its place among the loggers.
    """
    for place, logger in enumerate(loggers):
        if place in failed:
            continue
        try:
            logger.log(step, values)
        except Exception as error:
            # Training is worth more than its figures.
            text = f"{type(logger).__name__} is not used any more: {type(error).__name__}: {error}"
            print(text, flush=True)
            failed[place] = text.partition("\n")[0][:LINE_MAX]


def close_all(loggers: Sequence[Logger], *, failed: Container[int] = ()) -> None:
    """Let each write what it holds back; a service that does not answer is not waited for long."""

    def close(logger: Logger, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:
            kind = type(logger).__name__
            print(f"{kind} was not closed: {type(error).__name__}: {error}", flush=True)

    for place, logger in enumerate(loggers):
        end = getattr(logger, "close", None)
        if end is None or place in failed:
            continue
        closing = threading.Thread(target=close, args=(logger, end), daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            kind = type(logger).__name__
            print(f"{kind} was not closed within {CLOSE_S:.0f} s", flush=True)


class JsonLines:
    """Appends one JSON object for each step to a file; ``null``: not finite."""

    def __init__(self, path: str | Path) -> None:
        self.path = self.output = Path(path)

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
        self.output = Path(folder)
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional package

            self._writer = SummaryWriter(self.folder)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the file of events."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs to Weights & Biases, by the package ``wandb``; takes ``wandb.init``'s arguments.

    Give an ``id``, so that a rank on another node resumes the run.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.output = Path(settings.get("dir") or "", "wandb")
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._run is None:
            import wandb  # noqa: PLC0415 - an optional package

            self._run = wandb.init(**{"resume": "allow", **self.settings})
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send the last figures, and mark the run as finished."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """Logs to a run of MLflow, by the package ``mlflow``; takes ``mlflow.start_run``'s arguments.

    Give a ``run_id``, so that a rank on another node resumes the run.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.output = Path("mlruns")
        self._mlflow: Any = None
        self._run = ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if self._mlflow is None:
            import mlflow  # noqa: PLC0415 - an optional package

            self._run = mlflow.start_run(**self.settings).info.run_id
            self._mlflow = mlflow
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        if self._mlflow is not None:
            # end_run() knows the runs of its own thread only.
            self._mlflow.MlflowClient().set_terminated(self._run)


def outputs_of(loggers: Sequence[Logger]) -> Iterator[str]:
    """Yield what loggers write below the present folder, by its name there."""
    here = Path.cwd()
    for logger in loggers:
        if isinstance(logger, JsonLines | TensorBoard | WandB | MLflow):
            place = Path(os.path.normpath(here / logger.output))
            if here in place.parents:
                yield str(place.relative_to(here))
