"""Train a module of your own under any plan: ``import sailor``.

The code is in ``worker.script``; this module gives its public names a home. They are loaded at
their first use, since torch takes seconds to load.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

try:
    from worker.script.mistakes_hook import print_input_errors
except ModuleNotFoundError as error:
    hidden, dot, _ = (error.name or "").partition(".")
    if not dot or hidden not in {"simulator", "worker"}:
        raise
    what = f"a module of yours, {hidden}, hides the package of Sailor with that name"
    raise ImportError(f"{what}: rename it") from None

if TYPE_CHECKING:
    from worker.data.datasets.blend import Blend
    from worker.data.datasets.packing import Packed
    from worker.data.datasets.padding import pad
    from worker.data.datasets.stream import Stream
    from worker.data.datasets.token_dataset import Tokens
    from worker.reporting.loggers import JsonLines, MLflow, TensorBoard, WandB
    from worker.script.hf_model import hf
    from worker.script.script_trainer import Trainer
    from worker.script.transformers_trainer import from_transformers

__all__ = [
    "Blend",
    "JsonLines",
    "MLflow",
    "Packed",
    "Stream",
    "TensorBoard",
    "Tokens",
    "Trainer",
    "WandB",
    "from_transformers",
    "hf",
    "pad",
]

_HOMES = {
    "Blend": "worker.data.datasets.blend",
    "Packed": "worker.data.datasets.packing",
    "Stream": "worker.data.datasets.stream",
    "Tokens": "worker.data.datasets.token_dataset",
    "pad": "worker.data.datasets.padding",
    "Trainer": "worker.script.script_trainer",
    "from_transformers": "worker.script.transformers_trainer",
    "hf": "worker.script.hf_model",
} | dict.fromkeys(("JsonLines", "MLflow", "TensorBoard", "WandB"), "worker.reporting.loggers")


print_input_errors()
# What peft asks of models of transformers, and no user can change.
warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sailor' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = f"sailor.{name} needs PyTorch, which is not installed"
        raise ImportError(f"{what}: install the group `worker` (make install)") from None
