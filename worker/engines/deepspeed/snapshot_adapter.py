"""Adapter that exports and imports DeepSpeed's state for snapshots.

Where DeepSpeed keeps its state depends on precision and ZeRO. So each rank also has its layers as
buffers of the sailor engine, in host memory. They are filled before a snapshot, which copies them;
a restored snapshot is loaded into them and from there into DeepSpeed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.data.batch import DataSource
from worker.distributed.interface import Collective, Transport
from worker.distributed.process_groups import ProcessTransport
from worker.engines.deepspeed.config import read_config
from worker.engines.deepspeed.engine import DeepSpeedTrainer, leave_groups
from worker.engines.select import snapshot_job
from worker.layout.rank_layout import rank_places
from worker.layout.tensor_table import holdings_for
from worker.models.apply_plan import ShardValues, build_layers
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.models.starting_weights import zero_weights
from worker.profiling.timeline import Recorder
from worker.training.flat_buffers import LayerBuffer, layer_buffers
from worker.training.full_tensors import load_full_tensors, merge_ranks, rank_tensors
from worker.training.optimizer import OptimizerStep
from worker.training.precision import formats_of
from worker.training.same_start import check_same_start
from worker.training.snapshot_hook import NoSnapshots, ReplicaMismatchError, SnapshotHook
from worker.training.step_report import StepReport
from worker.training.trainer import NotANumberError, TrainingProgress
from worker.training.zero1 import owned_buckets


class DeepSpeedEngine:
    """One rank trained by DeepSpeed, as a ``TrainingEngine``."""

    buffers_are_live = False
    unlogged = ""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        transport: Transport,
        store: Store,
        data: DataSource,
        *,
        deadline_s: float,
        device: torch.device,
        recorder: Recorder,
        weights: Callable[[int], ShardValues] | None,
    ) -> None:
        _check_available(job, device)
        self.job = snapshot_job(job, plan)
        self.plan, self.rank, self.device = plan, rank, device
        self.precision = formats_of(job)
        self.recorder = recorder
        self.update_complete = True
        self._compared = False
        """Whether all ranks are known to see the same samples."""
        self.holdings = holdings_for(plan, job)
        self._transport = transport
        self.world_group: Collective | None = None
        if isinstance(transport, ProcessTransport):
            self.world_group = transport.group(tuple(range(plan.device_count)))
            transport.also_abort(_opened_backends)
        config = read_config(None, plan, job)
        shared: dict[str, Any] = {
            "device": device,
            "deadline_s": deadline_s,
            "weights": weights,
            "check": transport.check,
        }
        build = partial(DeepSpeedTrainer, job, plan, rank, store, data, config, **shared)
        try:
            self._trainer: DeepSpeedTrainer = self._call_guarded(build)
        except BaseException:
            leave_groups()
            raise
        self.buffers: Mapping[int, LayerBuffer] = self._buffers()

    @property
    def progress(self) -> TrainingProgress:
        return self._trainer.progress

    @progress.setter
    def progress(self, progress: TrainingProgress) -> None:
        self._trainer.progress = progress

    @property
    def snapshot_hook(self) -> SnapshotHook:
        return self._trainer.snapshot_hook

    @snapshot_hook.setter
    def snapshot_hook(self, hook: SnapshotHook) -> None:
        self._trainer.snapshot_hook = hook

    def step(self) -> StepReport:
        """Train on the next batch; all ranks take the same steps together."""
        self.recorder.at_step(self.progress.step)
        if not self._compared and self.world_group is not None:
            step = self.progress.step
            digest = self._trainer.first_digest(step)
            check_same_start(digest, step, {}, self.world_group, self.plan, self.device)
        self._compared = True
        # An interrupted step may have changed anything, so only the last snapshot counts.
        self.update_complete = False
        with self.recorder.span("step"):
            report: StepReport = self._call_guarded(self._trainer.step)
        self.update_complete = True
        return report

    def log(self, report: StepReport) -> None:
        pass

    def end_log(self) -> None:
        pass

    def evaluate_if_due(self) -> dict[str, float] | None:
        return None

    @property
    def may_roll_forward(self) -> bool:
        return False

    def roll_forward(self) -> StepReport | None:
        return None

    def export_state(self) -> None:
        held = self._call_guarded(self._trainer.rank_tensors)
        logical = {key: whole for key, ((_, whole),) in held.items()}
        for buffer in self.buffers.values():
            load_full_tensors(buffer, logical, self.precision)
        self._transport.check()  # On a GPU, an aborted sum ends like a completed one.

    def import_state(self) -> None:
        state = merge_ranks([rank_tensors(self.buffers.values())], self.holdings.tables)
        self._trainer.restore(state, self.progress)

    def close(self) -> None:
        self.snapshot_hook = NoSnapshots()
        self._trainer.close()

    def _buffers(self) -> dict[int, LayerBuffer]:
        """Return empty buffers for this rank's layers, in host memory."""
        job, rank = self.job, self.rank
        layers = build_layers(
            job,
            rank_places(self.plan)[rank].layers,
            context=MicroBatchContext(),
            dtype=self.precision.master,
            weights=zero_weights(job),
        )
        return layer_buffers(
            layers,
            self.holdings.tables,
            atoms=job.max_tp,
            held=range(job.max_tp),
            precision=self.precision,
            moments=OptimizerStep.moment_count(job),
            owned=owned_buckets(self.holdings, rank, zero=0),
            device=torch.device("cpu"),
        )

    def _call_guarded(self, act: Callable[[], Any]) -> Any:
        """Call DeepSpeed; report a broken connection as the loss of a rank."""
        try:
            return act()
        except (NotANumberError, ReplicaMismatchError):
            raise  # A peer that raised it first has ended this rank's connections, too.
        except RuntimeError as error:
            transport = self._transport
            if not isinstance(transport, ProcessTransport):
                raise
            is_connection_error = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not is_connection_error and not transport.wait_failed():
                raise
            transport.raise_cause(error, "a DeepSpeed step")


def _check_available(job: Job, device: torch.device) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        what = 'is "deepspeed", and that package is not installed on this node'
        raise InputError(Problem("[training] engine", what, 'install it, or give "sailor"'))
    if job.precision == "fp16" and device.type == "cpu":
        what = "is fp16, which DeepSpeed does not have on CPUs"
        raise InputError(Problem("[training] precision", what, 'give engine = "sailor"'))


def _opened_backends() -> Iterator[Any]:
    """Yield the backends of torch's global groups, which DeepSpeed has opened."""
    world: Any = dist.distributed_c10d._world
    for group in tuple(world.pg_map):
        for device in group._device_types:
            yield group._get_backend(device)
