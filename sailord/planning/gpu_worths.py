"""What one GPU of each kind is worth to a job, so that jobs can share nodes of several kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np

from planner.problem.job_options import micro_batch_sizes
from planner.replan.replanner import Replanner
from simulator.arrays import Floats
from simulator.documents.problems import InputError
from simulator.layer_costs.roofline import LayerTimes, kernels_of, launch_s

LEAST = 1e-4
"""No kind is worth less."""


def gpu_worths(replanner: Replanner, kinds: Iterable[str] = ()) -> tuple[tuple[str, float], ...]:
    """Return for each GPU kind of the cluster its speed, relative to the fastest.

    It is the speed of all layers on one GPU, at the middle one of the possible micro batches, so
    that it is the same for all plans of the job. The cluster has the kinds of its file, of the
    job's nodes, and ``kinds``: those of all nodes. Kinds whose times are computed get the same
    host: the time of a launch is that of the computer on which a kind was measured.
    """
    sizes = micro_batch_sizes(replanner.job)
    times: dict[str, LayerTimes] = {}
    for gpu in sorted({pool.gpu for pool in replanner.cluster.pools}.union(kinds)):
        with contextlib.suppress(InputError):  # A node's GPU kind that nothing is known of.
            times[gpu] = replanner.judge.costs.times(gpu, tp=1, samples=sizes[len(sizes) // 2])
    computed = {gpu for gpu, each in times.items() if each.provenance.source == "analytic"}
    host_s = max(map(launch_s, computed), default=0.0)
    least_s = host_s * kernels_of(replanner.job.model.layers)
    seconds = {
        gpu: _layers_s(each, least_s if gpu in computed else np.zeros_like(least_s))
        for gpu, each in times.items()
    }
    fastest = min(seconds.values(), default=0.0)
    return tuple((gpu, max(LEAST, round(fastest / each, 4))) for gpu, each in seconds.items())


def _layers_s(times: LayerTimes, least_s: Floats) -> float:
    """Return the seconds of all layers, each at least these, forward and backward."""
    return float(sum(np.maximum(row, least_s).sum() for row in (times.forward, times.backward)))
