"""One rank of a training run: a step, from the batch to the update of the weights.

The loss does not depend on the plan.

A step runs the micro batches of the rank's pipeline (``pipeline_schedule``), sums each layer's
gradients over all holders as soon as they are complete (``gradient_sync``), and ends in a vote
(``step_vote``). From its totals every rank computes the same norm, clipping, loss scale and
learning rate, and updates its weights (``optimizer``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from simulator.spec.job import Job, ParameterGroup
from simulator.spec.plan import Plan
from worker.data.batch import FIRST_HASH, DataSource, next_hash
from worker.data.data_files import check_identity, identity_of
from worker.data.datasets.map_dataset import MapData
from worker.data.sample_order import check_order, order_of
from worker.distributed.interface import Collective, Transport
from worker.layout.rank_layout import (
    TIED,
    Chunk,
    TensorSlot,
    atoms_held,
    channels_of,
    groups_of,
    rank_places,
)
from worker.layout.tensor_table import holdings_for
from worker.models.apply_plan import HeldLayer, ShardValues, build_layers
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.models.user_module.module_layers import ModuleSource, build_module_layers
from worker.profiling.compute_time import ComputeTimer
from worker.profiling.timeline import Recorder
from worker.training.flat_buffers import LayerBuffer, layer_buffers
from worker.training.full_tensors import TensorKey, load_full_tensors
from worker.training.gradient_sync import GradientSync
from worker.training.optimizer import (
    OptimizerStep,
    ParameterRanges,
    clip_factor,
    groups_in,
    is_fused,
    learning_rate,
)
from worker.training.pipeline_schedule import PipelineRank, ignore_layer
from worker.training.pipeline_stage import StageRunner
from worker.training.precision import LossScale, NumberFormats, formats_of, loss_factor, on_device
from worker.training.same_start import check_same_start
from worker.training.snapshot_hook import NoSnapshots, SnapshotHook
from worker.training.step_report import StepReport
from worker.training.step_vote import StepContribution, StepTotals, StepVote
from worker.training.utilization import seconds_at_peak
from worker.training.zero1 import Zero1Update, owned_buckets

_LAST_VOTES_S = 1.0
"""Seconds for the surviving ranks to report their last votes after a failure; on hosts that are
busy a message takes tenths of one. Only silent ranks make others wait for all of it."""


class NotANumberError(RuntimeError):
    """The loss or a gradient is not finite, and neither a smaller loss scale nor skipping helps."""

    def __init__(self, step: int, *, layer: int | None, rank: int | None, skipped: int = 0) -> None:
        self.step, self.layer, self.rank = step, layer, rank
        if layer is None:
            what = "the loss is not finite, though every output was when it was computed again"
        elif rank is None:
            what = f"the gradient of layer {layer} is not finite"
        else:
            what = f"the output of layer {layer} is not finite on rank {rank}, the first such layer"
        before = f"; so were {skipped} steps before, whose updates were skipped" if skipped else ""
        super().__init__(f"step {step}: {what}{before}")


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a run besides its tensors, the same on every rank."""

    step: int = 0
    """The number of consumed batches, including those whose update was skipped."""
    updates: int = 0
    scale: LossScale = field(default_factory=LossScale)
    sample_hash: str = FIRST_HASH
    samples: int = 0
    label_tokens: int = 0
    nonfinite: int = 0
    """Steps in a row whose update was skipped although no smaller loss scale would help."""
    data: str = ""
    """Which files the samples are from, if any."""

    order: str = ""
    """What the order of a script's samples depends on."""

    @classmethod
    def first(cls, scale: LossScale, data: DataSource) -> TrainingProgress:
        """Return the progress before the first step on some data."""
        return cls(scale=scale, data=identity_of(data), order=order_of(data))

    def on(self, fresh: TrainingProgress) -> TrainingProgress:
        """Continue with the data of a fresh run; ``InputError`` if they are others than before."""
        check_identity(fresh.data, self.data)
        check_order(fresh.order, self.order, step=self.step)
        return replace(self, data=fresh.data, order=fresh.order)


class RankTrainer:
    """One rank of a plan, ready for the next step."""

    buffers_are_live = True

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        transport: Transport,
        data: DataSource,
        *,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
        precision: NumberFormats | None = None,
        weights: Callable[[int], ShardValues] | None = None,
        busy: ComputeTimer | None = None,
        module: ModuleSource | None = None,
        fuses_update: bool | None = None,
    ) -> None:
        """``fuses_update``: use a fused optimizer; by default if the device allows it."""
        self.job, self.plan, self.rank = job, plan, rank
        self.device = torch.device(device)
        self.precision = on_device(precision or formats_of(job), self.device)
        self.recorder = recorder or Recorder(rank)
        self._busy = busy or ComputeTimer(self.device)
        self._at_peak_s = seconds_at_peak(job, plan, self.device)
        self.snapshot_hook: SnapshotHook = NoSnapshots()
        self.unlogged = ""
        self._begin_s, self._summed = 0.0, -1
        """When the last step began, and the one whose gradients are complete here."""
        self._compared = False
        """Whether all ranks are known to see the same samples."""
        self._waited_s = 0.0
        """How long this rank had waited for samples when the last step began."""
        self.update_complete = True
        """Weights and moments match ``progress``: no update was interrupted."""
        self._transport = transport
        self.progress = TrainingProgress.first(LossScale.first(self.precision, job), data)
        self._is_fused = is_fused(job, plan, self.device) if fuses_update is None else fuses_update
        self._module = module
        self.place = rank_places(plan)[rank]
        self.holdings = holdings_for(plan, job)
        # All ranks open them in the same order, before anything else can block.
        groups = groups_of(plan, self.holdings)
        transport.open(groups, channels_of(plan))
        opened = {ranks: transport.group(ranks) for ranks in groups if rank in ranks}
        context = MicroBatchContext()
        group = opened.get(self.place.tp_ranks) if self.place.tp > 1 else None
        layers = self._held_layers(group, context, weights)
        held = atoms_held(tp=self.place.tp, index=self.place.index, atoms=job.max_tp)
        self.buffers: Mapping[int, LayerBuffer] = layer_buffers(
            layers,
            self.holdings.tables,
            atoms=job.max_tp,
            held=held,
            precision=self.precision,
            moments=OptimizerStep.moment_count(job),
            owned=owned_buckets(self.holdings, rank, zero=job.zero),
            device=self.device,
        )
        self._groups = {
            layer: self._groups_of(layer, buffer.whole_slots, buffer.master.numel())
            for layer, buffer in self.buffers.items()
        }
        self._zero1 = (
            Zero1Update(rank, self.holdings, self.buffers, transport, self._groups_of)
            if job.zero
            else None
        )
        self._layers: tuple[HeldLayer, ...] = tuple(layers)
        by_number = {layer.index: layer for layer in self._layers}
        runners = {
            chunk.stage: StageRunner(
                [by_number[number] for number in range(*chunk.layers)],
                recomputed=self._find_recomputed(chunk),
                context=context,
                collect=self._collect_gradients,
                computes_loss=chunk.stage == self.place.stages - 1,
            )
            for chunk in self.place.chunks
        }
        self._sync = GradientSync(
            self.place,
            self.holdings,
            self.buffers,
            transport,
            self.recorder,
            self._busy,
            to_owners=job.zero == 1,
            shares_tokens=plan.sequence_parallel,
        )
        self.world_group = opened.get(tuple(range(len(rank_places(plan)))))
        self._vote = StepVote(rank, self.holdings, self.world_group, self.device)
        self._pipeline = PipelineRank(
            plan,
            self.place,
            runners,
            transport,
            data,
            random_seed=job.data.seed,
            precision=self.precision,
            device=self.device,
            recorder=self.recorder,
            busy=self._busy,
            of_module=module is not None,
            steps=job.steps,
            loaders=job.data.num_workers,
        )

    def _held_layers(
        self,
        group: Collective | None,
        context: MicroBatchContext,
        weights: Callable[[int], ShardValues] | None,
    ) -> Sequence[HeldLayer]:
        """Build what this rank holds of its layers: of the script's module, or of a family."""
        if self._module is None:
            return build_layers(
                self.job,
                self.place.layers,
                tp=self.place.tp,
                tp_index=self.place.index,
                group=group,
                context=context,
                dtype=self.precision.master,
                device=self.device,
                weights=weights,
                shares_tokens=self.plan.sequence_parallel,
            )
        return build_module_layers(
            self._module,
            self.job,
            self.place.layers,
            tp=self.place.tp,
            tp_index=self.place.index,
            group=group,
            context=context,
            master=self.precision.master,
            compute=self.precision.compute,
            device=self.device,
        )

    def step(self) -> StepReport:
        """Train on the next batch; all ranks take the same steps together."""
        if not self._compared and self.world_group is not None:
            step = self.progress.step
            with self.recorder.span("data"):
                digest = self._pipeline.first_digest(step)
            settings = {} if self._module is None else self._module.settings_digests()
            about = self.world_group, self.plan, self.device
            check_same_start(digest, step, settings, *about)
        self._compared = True
        self._begin_s = time.perf_counter()
        self._waited_s = self._pipeline.waited_for_data_s
        before = self.progress
        self.recorder.at_step(before.step)
        self._busy.begin_step(before.step)
        for buffer in self.buffers.values():
            buffer.begin_step()
        seed = loss_factor(self.job, self.precision, before.scale)
        overlaps = self.job.gradient_sync == "overlap"
        consumed = self._pipeline.run(
            before.step, seed=seed, layer_done=self._sync.start if overlaps else ignore_layer
        )
        for layer in self.buffers:
            if layer == TIED or not overlaps:
                self._sync.start(layer)
        with self.recorder.span("wait"):
            self._sync.finish()
        contribution = StepContribution(
            consumed.loss_sum,
            consumed.samples,
            consumed.labels,
            consumed.digest_sum,
            self.snapshot_hook.wants_to_stop(before.step),
        )
        self._summed = before.step
        with self.recorder.span("vote"):
            totals = self._vote.cast(self.buffers, contribution)
            self._busy.end_vote()
            self._transport.record_vote((before.step, totals.slots))
            self._transport.check()  # A failure before this did not tell the peers of the vote.
        self._raise_if_not_finite(totals)
        return self._end_step(totals)

    def log(self, report: StepReport) -> None:
        """Tell a script's loggers of a step."""
        if self._module is not None and self.rank == 0:
            self.unlogged = self._module.report(report.step, report.figures())

    def end_log(self) -> None:
        """Tell a script's loggers that training has ended."""
        if self._module is not None and self.rank == 0:
            self._module.end_report()

    def evaluate_if_due(self) -> dict[str, float] | None:
        """Evaluate if that is due after the last step, which another process may have done."""
        module, step = self._module, self.progress.step - 1
        data = None if module is None or step < 0 else module.evaluation_after(step)
        if module is None or data is None:
            return None
        found = self.evaluate(data)
        if self.rank == 0:
            values = {f"eval/{name}": value for name, value in found.items()}
            self.unlogged = module.report(step, values)
        return found

    def evaluate(self, data: MapData) -> dict[str, float]:
        """Compute the metrics of a data set with the current weights; all ranks do so together."""
        assert self._module is not None, "only scripts evaluate"
        names = self._module.metric_names
        for layer in self._layers:
            layer.set_training(False)
        found = self._pipeline.evaluate(data)
        for layer in self._layers:
            layer.set_training(True)
        totals = torch.tensor(
            [found.get(name, [0.0, 0.0]) for name in names], dtype=torch.float64
        ).to(self.device)
        group = self.world_group
        sums = totals.tolist() if group is None else group.read_sum(totals)
        pairs = zip(names, sums, strict=True)
        return {name: total / max(count, 1.0) for name, (total, count) in pairs}

    @property
    def may_roll_forward(self) -> bool:
        """Whether this rank's gradients are complete; with ZeRO-1 an update needs all ranks."""
        return self._summed == self.progress.step and self.update_complete and self._zero1 is None

    def roll_forward(self) -> StepReport | None:
        """After a failure: finish the step if a surviving rank has the result of its vote.

        That result proves that the gradients of the step are complete on all ranks, so the update
        can be applied here too. It is passed on to the others.
        """
        step = self.progress.step
        if not self.may_roll_forward:
            return None
        for voted, slots in self._transport.last_votes(_LAST_VOTES_S):
            totals = self._vote.totals_from(slots)
            if voted == step and self._may_end_with(totals):
                return self._end_step(totals)
        return None

    def _end_step(self, totals: StepTotals) -> StepReport:
        """Update the weights and the progress from the totals of the vote."""
        before = self.progress
        seed = loss_factor(self.job, self.precision, before.scale)
        # Losses and gradients are sums; they become means over the step's labels here.
        mean = 1.0 / (seed * max(totals.labels, 1))
        norm = totals.norm * mean
        self.update_complete = False
        if totals.is_finite:
            with self.recorder.span("step"):
                self.snapshot_hook.before_update()
                self._update(before, factor=mean * clip_factor(norm, self.job.clip_norm))
        self.progress = self._progress_after(before, totals)
        self.update_complete = True
        self._busy.end_step()
        return StepReport(
            step=before.step,
            loss=totals.loss_sum / max(totals.labels, 1),
            grad_norm=norm,
            samples=totals.samples,
            seconds=time.perf_counter() - self._begin_s,
            sample_hash=self.progress.sample_hash,
            label_tokens=totals.labels,
            learning_rate=learning_rate(self.job, before.step) * self._schedules(before.step)[0],
            skipped=not totals.is_finite,
            skipped_steps=self.progress.step - self.progress.updates,
            stop=totals.stop,
            at_peak_s=self._at_peak_s,
            data_wait_s=self._pipeline.waited_for_data_s - self._waited_s,
        )

    def _schedules(self, step: int) -> tuple[float, ...]:
        return (1.0,) if self._module is None else self._module.schedules(step)

    def _groups_of(self, layer: int, slots: Sequence[TensorSlot], length: int) -> ParameterRanges:
        """Return the groups of the tensors in one of the flat buffers of a layer."""
        module = self._module
        if module is None:
            return groups_in(slots, length, lambda _: ParameterGroup())
        index = 0 if layer == TIED else layer
        return groups_in(
            slots, length, lambda name: module.group_of(module.cut.full_name(index, name))
        )

    def export_state(self) -> None:
        """No-op: the buffers are the live state."""

    def import_state(self) -> None:
        """No-op: the buffers are the live state."""

    def close(self) -> None:
        """Load no more samples; the caller closes the transport."""
        self._pipeline.close()

    def restore(self, logical: Mapping[TensorKey, Tensor], progress: TrainingProgress) -> None:
        """Continue from full tensors, which any plan may have produced."""
        for buffer in self.buffers.values():
            load_full_tensors(buffer, logical, self.precision)
        scale = progress.scale.restored(self.precision, self.job)
        self.progress = replace(progress, scale=scale).on(self.progress)

    def _find_recomputed(self, chunk: Chunk) -> frozenset[int]:
        """Return the layers that keep only their input; not the head, used again at once."""
        layers, first = self.job.model.layers, chunk.layers[0]
        return frozenset(i for i in range(first, first + chunk.recomputed) if layers[i].checkpoint)

    def _collect_gradients(self, layer: int) -> None:
        self.buffers[layer].collect_gradients()
        if TIED in self.buffers:
            self.buffers[TIED].collect_gradients()

    def _update(self, before: TrainingProgress, *, factor: float) -> None:
        update = OptimizerStep(
            self.job.optimizer,
            learning_rate(self.job, before.step),
            gradient_factor=factor,
            count=before.updates + 1,
            settings=self.job.update,
            schedules=self._schedules(before.step),
            is_fused=self._is_fused,
        )
        if self._zero1 is not None:
            self._zero1.apply(update)
        with self._busy.piece("update"):
            for layer, buffer in self.buffers.items():
                if self._zero1 is None:
                    update.apply_by_group(
                        self._groups[layer], buffer.master, buffer.gradient, buffer.moments
                    )
                if buffer.compute is not buffer.master:
                    self.precision.derive(buffer.master, into=buffer.compute)

    def _progress_after(self, before: TrainingProgress, totals: StepTotals) -> TrainingProgress:
        nonfinite = before.nonfinite + int(before.scale.factor == 1)
        return replace(
            before,
            step=before.step + 1,
            updates=before.updates + int(totals.is_finite),
            scale=before.scale.after(self.precision, overflow=not totals.is_finite),
            sample_hash=next_hash(
                before.sample_hash, step=before.step, digest_sum=totals.digest_sum
            ),
            samples=before.samples + totals.samples,
            label_tokens=before.label_tokens + totals.labels,
            nonfinite=0 if totals.is_finite else nonfinite,
        )

    def _may_end_with(self, totals: StepTotals) -> bool:
        """Return whether all is finite, a smaller loss scale may help, or the step is skipped."""
        progress = self.progress
        is_few = progress.nonfinite < self.job.skip_nonfinite
        return totals.is_finite or progress.scale.factor > 1 or is_few

    def _raise_if_not_finite(self, totals: StepTotals) -> None:
        """Raise ``NotANumberError`` on all ranks if the step cannot end with these totals."""
        if self._may_end_with(totals):
            return
        self.snapshot_hook.before_giving_up()
        step, skipped = self.progress.step, self.progress.nonfinite
        bad = self._pipeline.first_bad_layer(step)
        named = self._vote.first_bad_layer(bad)
        if named is not None:
            layer, rank = named
            raise NotANumberError(step, layer=layer, rank=rank, skipped=skipped)
        squares = totals.squares.items()
        first = next((max(layer, 0) for layer, square in squares if not isfinite(square)), None)
        raise NotANumberError(step, layer=first, rank=None, skipped=skipped)
