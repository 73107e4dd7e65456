"""Types of the numpy arrays that the simulator and the planner compute with."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def prefix_sums(row: ArrayLike) -> Floats:
    """Sums of all entries before each index, so that the sum of a range is one subtraction."""
    return np.concatenate([[0.0], np.cumsum(row)])
