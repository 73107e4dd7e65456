"""What one GPU of each kind is worth to a job, so that jobs can share nodes of several kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from planner.problem.job_options import micro_batch_sizes
from planner.replan.replanner import Replanner
from simulator.documents.problems import InputError

LEAST = 1e-4
"""No kind is worth less."""


def gpu_worths(replanner: Replanner, kinds: Iterable[str] = ()) -> tuple[tuple[str, float], ...]:
    """Return for each GPU kind of the cluster its speed, relative to the fastest.

    It is the speed of all layers on one GPU, at the middle one of the possible micro batches, so
    that it is the same for all plans of the job. The cluster has the kinds of its file, of the
    job's nodes, and ``kinds``: those of all nodes.
    """
    sizes = micro_batch_sizes(replanner.job)
    seconds: dict[str, float] = {}
    for gpu in sorted({pool.gpu for pool in replanner.cluster.pools}.union(kinds)):
        with contextlib.suppress(InputError):  # A node's GPU kind that nothing is known of.
            times = replanner.judge.costs.times(gpu, tp=1, samples=sizes[len(sizes) // 2])
            seconds[gpu] = float(times.forward.sum() + times.backward.sum())
    fastest = min(seconds.values(), default=0.0)
    return tuple((gpu, max(LEAST, round(fastest / each, 4))) for gpu, each in seconds.items())
