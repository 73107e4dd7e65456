"""Runs a script with fp64 in place of every other precision: ``exact_script.py SCRIPT ARGUMENTS``.

Then losses under different plans differ by 1e-12, and a wrong gradient is not taken for rounding.
Models that compute their norms in fp32 whatever they are given compute them in fp64 too.
"""

import runpy
import sys
from typing import Any

import torch

from worker.checkpoint import compatibility, placement
from worker.checkpoint.snapshots import snapshot_manager
from worker.training import precision

_to, _float = torch.Tensor.to, torch.Tensor.float


def keep_fp64(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """Convert as asked for, but do not round fp64 to fp32."""
    rounds = torch.float32 in (*given, *named.values())
    return tensor if rounds and tensor.dtype == torch.float64 else _to(tensor, *given, **named)


def keep_float(tensor: torch.Tensor) -> torch.Tensor:
    """Do the same for ``tensor.float()``."""
    return tensor if tensor.dtype == torch.float64 else _float(tensor)


precision._BY_NAME.update(dict.fromkeys(precision._BY_NAME, precision.FP64))
for module in (compatibility, placement, snapshot_manager):  # What sizes and describes snapshots.
    vars(module)["dtype_of"] = lambda _: "float64"
for name, method in (("to", keep_fp64), ("float", keep_float)):
    setattr(torch.Tensor, name, method)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
