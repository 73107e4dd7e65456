"""Memory-mapped arrays in numpy's file format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.documents.problems import InputError, Problem

_MAGIC = b"\x93NUMPY"


def open_array(path: Path, *, cure: str) -> NDArray[Any]:
    """Memory-map a .npy file, whatever its suffix."""
    name = path.name or str(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}"
        raise InputError(Problem(name, what, "name an existing file")) from None
    if magic != _MAGIC:
        raise InputError(Problem(name, "is not an array in numpy's format (npy)", cure))
    try:
        # Pickled objects are refused, since loading them runs code.
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        what = "is truncated or damaged: it does not hold what its header says"
        raise InputError(Problem(name, what, "copy or make it again")) from None
    return array
