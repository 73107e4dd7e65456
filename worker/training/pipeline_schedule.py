"""One rank's passes of a step, in the order of its schedule (1F1B, GPipe or interleaved 1F1B).

The order is the one that the simulator times (``simulator.estimate.pass_order``). Inputs are
requested before they are needed (``input_requests``); outputs are sent without waiting.

A receiver takes tensors in the order in which the peer sends them, so both must use one order. With
two device groups that send each other both activations and
gradients, this holds because all schedules pair forwards with backwards alike
(``tests/worker/training/test_input_requests.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simulator.estimate.pass_order import Op, device_orders
from simulator.spec.plan import Plan
from worker.data.batch import NO_LABEL, DataSource, Samples
from worker.data.batch_tree import leaves_of
from worker.data.datasets.map_dataset import MapData, OneEpoch
from worker.data.read_ahead import ReadAhead
from worker.devices.rank_device import to_device
from worker.distributed.interface import Collective, Transport
from worker.layout.rank_layout import (
    RankPlace,
    neighbouring_stage,
    rank_places,
    receivers_of,
    sample_positions,
    sender_for,
)
from worker.models.random_numbers.microbatch_context import MicroBatch, batch_on_device
from worker.profiling.compute_time import ComputeTimer
from worker.profiling.timeline import Recorder
from worker.training.input_requests import requests_of
from worker.training.pipeline_p2p import Shapes, TensorReceiver, TensorSender
from worker.training.pipeline_stage import StageRunner
from worker.training.precision import NumberFormats


@dataclass(slots=True)
class ConsumedSamples:
    """What one rank counted in a step; each sample is counted by one rank only."""

    loss_sum: Tensor
    samples: int = 0
    labels: int | Tensor = 0
    digest_sum: int = 0


class PipelineRank:
    """One rank with its stages, its neighbours and its data."""

    def __init__(
        self,
        plan: Plan,
        place: RankPlace,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        data: DataSource,
        *,
        random_seed: int,
        precision: NumberFormats,
        device: torch.device,
        recorder: Recorder,
        busy: ComputeTimer,
        of_module: bool,
        steps: int | None = None,
        loaders: int = 0,
    ) -> None:
        """``runners`` has the layers of each stage; ``loaders`` processes load samples."""
        self._loaders = loaders
        # Every stage of a user's module needs the batch, and its boundaries may vary in shape.
        self._of_module = of_module
        self._signatures: dict[int, Hashable] = {}
        """By micro batch of this step, once it is loaded: what the shapes at boundaries depend on;
        empty for a built-in model, where they are all alike."""
        self._samples: dict[int, Samples] = {}
        """By micro batch: what a later chunk needs, too."""
        self._plan, self._place, self._runners = plan, place, runners
        self._random_seed, self._device = random_seed, device
        self._dtype, self._wire = precision.compute, precision.wire
        self._recorder, self._busy = recorder, busy
        count = plan.pipelines[place.pipeline].micro_batches
        orders = device_orders(
            plan.schedule,
            stages=place.stages,
            micro_batches=count,
            virtual_stages=plan.virtual_stages,
        )
        self._order: list[Op] = orders[place.stage]
        # All schedules begin the micro batches in their order.
        self._all_positions = [self._positions(number) for number in range(count)]
        self._check = transport.check
        self._source = data
        self._data = ReadAhead(
            data, self._all_positions, steps=steps, check=self._check, processes=loaders
        )
        places = rank_places(plan)
        before, after = (neighbouring_stage(places, place, step=step) for step in (-1, 1))
        senders = {
            kind: sender_for(place, ranks).rank
            for kind, ranks in (("F", before), ("B", after))
            if ranks
        }
        self._expected_first, self._expected_after = requests_of(
            orders,
            place.stage,
            is_early=transport.requests_early and not of_module,
            source_of=lambda op: senders[op.kind] if self._is_sent(op) else None,
        )

        def sharing(others: tuple[RankPlace, ...]) -> Collective | None:
            """Return the ranks that share the tokens of what they exchange whole with others."""
            if not plan.sequence_parallel or place.tp in {1, len(others)}:
                return None
            return transport.group(place.tp_ranks)

        def inbox(
            kind: str, others: tuple[RankPlace, ...], shapes: Shapes | None = None
        ) -> TensorReceiver | None:
            source = senders.get(kind)
            if source is None:
                return None
            return TensorReceiver(
                transport,
                source,
                dtype=self._wire,
                device=device,
                shapes=shapes,
                sharing=sharing(others),
            )

        def outbox(receivers: tuple[RankPlace, ...], *, tells_shapes: bool = True) -> TensorSender:
            targets = [target.rank for target in receivers_of(place, receivers)]
            return TensorSender(
                transport, targets, tells_shapes=tells_shapes, sharing=sharing(receivers)
            )

        self._inputs, self._results = inbox("F", before), outbox(after)
        # A gradient has the shape of its activation.
        self._gradients = inbox("B", after, self._results.shapes)
        self._input_gradients = outbox(before, tells_shapes=False)

    def run(self, step: int, *, seed: float, layer_done: Callable[[int], None]) -> ConsumedSamples:
        """Run all micro batches; ``layer_done`` is called for each layer whose gradients are
        complete.

        ``seed`` is the factor on the sum of losses before it is differentiated.
        """
        consumed = self._count_nothing()
        self._forget_samples()
        last = {op.stage: index for index, op in enumerate(self._order) if op.kind == "B"}
        for op in self._expected_first:
            self._expect(op)
        for index, op in enumerate(self._order):
            self._check()  # After a loss, what is done already is worth sealing, and no more.
            samples = self._load(op, step)
            arrived = self._take(op)
            following = self._expected_after[index]
            if following is not None:
                self._expect(following)
            if op.kind == "F":
                work = self._work(op, samples, arrived, step, consumed)
                self._forward(op, *work, consumed)
            else:
                done = layer_done if index == last[op.stage] else ignore_layer
                self._backward(op, arrived, seed=seed, layer_done=done)
        with self._recorder.span("wait"):
            self._results.finish()
            self._input_gradients.finish()
        return consumed

    @property
    def waited_for_data_s(self) -> float:
        """How long this rank has waited for samples in all its steps."""
        return self._data.waited_s

    def first_bad_layer(self, step: int) -> int | None:
        """Repeat the forward passes and return the first layer here with a non-finite output."""
        found: list[int] = []
        self._forget_samples()
        for op in self._order:
            if op.kind == "F":
                samples = self._load(op, step)
                x, current = self._work(op, samples, self._take(op), step, self._count_nothing())
                bad, result = self._runners[op.stage].first_bad_layer(x, current=current)
                found += [] if bad is None else [bad]
                if not self._is_loss(op.stage):
                    self._results.send(result.to(self._wire), self._signature(op, op.stage))
        self._results.finish()
        return min(found, default=None)

    def evaluate(self, data: MapData) -> dict[str, list[float]]:
        """Run forward passes over a data set; the last stage returns sums and counts."""
        count = data.batches()
        ahead = ReadAhead(
            OneEpoch(data),
            self._all_positions,
            steps=count,
            check=self._check,
            processes=self._loaders,
        )
        try:
            return self._evaluate(data, ahead)
        finally:
            ahead.close()

    def _evaluate(self, data: MapData, ahead: ReadAhead) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        self._forget_samples()
        for number in range(data.batches()):
            for op in self._order:
                positions = data.positions_in(number, self._positions(op.micro_batch))
                if op.kind == "B" or not positions:
                    continue
                self._check()
                samples = self._samples_of(op, ahead, number)
                self._signatures[op.micro_batch] = "evaluation", signature_of(samples.inputs)
                arrived = self._take(op)
                indices = torch.tensor(positions, device=self._device)
                current = MicroBatch(self._random_seed, number, indices)
                current.inputs = self._move_to_device(samples.inputs)
                x = torch.empty(0, device=self._device) if arrived is None else arrived
                result = self._runners[op.stage].evaluate(x, current=current)
                if isinstance(result, Tensor):
                    # No gradient comes back for which this stage would wait.
                    self._results.wait_for_room()
                    self._results.send(result.to(self._wire), self._signature(op, op.stage))
                    continue
                for name, (total, count) in result.items():
                    sums = found.setdefault(name, [0.0, 0.0])
                    sums[0] += float(total)
                    sums[1] += float(count)
        self._results.finish()
        return found if self._place.index == 0 else {}

    def close(self) -> None:
        """Load no more samples."""
        self._data.close()

    def first_digest(self, step: int) -> int | None:
        """Load a step's first sample, which no other rank may see differently; ``None``: none."""
        if not any(self._needs_samples(chunk.stage) for chunk in self._place.chunks):
            return None
        first, processes = range(1), min(self._loaders, 1)
        with closing(
            ReadAhead(self._source, [first], steps=step + 1, check=self._check, processes=processes)
        ) as ahead:
            return int(ahead.batch(step, first).digests[0])

    def _needs_samples(self, stage: int) -> bool:
        return stage == 0 or self._is_loss(stage) or self._of_module

    def _positions(self, micro_batch: int) -> range:
        """Return the positions of a micro batch's samples in the global batch."""
        return sample_positions(self._plan, pipeline=self._place.pipeline, micro_batch=micro_batch)

    def _is_loss(self, stage: int) -> bool:
        """Return whether a stage computes the loss."""
        return stage == self._place.stages - 1

    def _is_sent(self, op: Op) -> bool:
        """Return whether the input of a pass comes from another rank."""
        return op.stage > 0 if op.kind == "F" else not self._is_loss(op.stage)

    def _forward(self, op: Op, x: Tensor, current: MicroBatch, consumed: ConsumedSamples) -> None:
        number = op.micro_batch
        with self._recorder.span("forward", micro_batch=number), self._busy.piece("F", number):
            result = self._runners[op.stage].forward(number, x, current=current)
        if not self._is_loss(op.stage):
            with self._recorder.span("send", micro_batch=op.micro_batch):
                self._results.send(result.to(self._wire), self._signature(op, op.stage))
        elif self._place.index == 0:
            consumed.loss_sum += result
            consumed.labels += current.label_count

    def _backward(
        self, op: Op, arrived: Tensor | None, *, seed: float, layer_done: Callable[[int], None]
    ) -> None:
        number = op.micro_batch
        with self._recorder.span("backward", micro_batch=number), self._busy.piece("B", number):
            below = self._runners[op.stage].backward(
                number, seed if arrived is None else arrived, layer_done=layer_done
            )
        if op.stage > 0:
            assert below is not None, "activations have gradients"
            with self._recorder.span("send", micro_batch=op.micro_batch):
                signature = self._signature(op, op.stage - 1)
                self._input_gradients.send(below.to(self._wire), signature)

    def _load(self, op: Op, step: int) -> Samples | None:
        """Return the samples of a forward pass, if this stage needs them."""
        if op.kind == "B" or not self._needs_samples(op.stage):
            return None
        with self._recorder.span("data", micro_batch=op.micro_batch):
            samples = self._samples_of(op, self._data, step)
        if self._of_module:
            self._signatures[op.micro_batch] = signature_of(samples.inputs)
        return samples

    def _samples_of(self, op: Op, ahead: ReadAhead, step: int) -> Samples:
        """Return a micro batch's samples, which are loaded once for all chunks."""
        samples = self._samples.pop(op.micro_batch, None)
        if samples is None:
            samples = ahead.batch(step, self._positions(op.micro_batch))
        if self._of_module and op.stage < self._place.chunks[-1].stage:
            self._samples[op.micro_batch] = samples
        return samples

    def _forget_samples(self) -> None:
        self._signatures.clear()
        self._samples.clear()

    def _work(
        self,
        op: Op,
        samples: Samples | None,
        arrived: Tensor | None,
        step: int,
        consumed: ConsumedSamples,
    ) -> tuple[Tensor, MicroBatch]:
        """Return the input of a forward pass, and what else is known of its micro batch."""
        index = self._place.index
        positions = self._positions(op.micro_batch)
        indices = torch.arange(positions.start, positions.stop, device=self._device)
        current = MicroBatch(self._random_seed, step, indices)
        if samples is None:
            assert arrived is not None
            return arrived, current
        current.inputs = self._move_to_device(samples.inputs)
        if op.stage == 0 and index == 0:
            consumed.samples += len(positions)
            consumed.digest_sum += int(samples.digests.sum())
        if self._is_loss(op.stage) and samples.labels is not None:
            current.label_count = int((samples.labels != NO_LABEL).sum())
            current.labels = to_device(samples.labels, self._device)
        if arrived is None:
            is_tensor = isinstance(current.inputs, Tensor)
            arrived = current.inputs if is_tensor else torch.empty(0, device=self._device)
        return arrived, current

    def _move_to_device(self, batch: Any) -> Any:
        return batch_on_device(
            batch, of_module=self._of_module, dtype=self._dtype, device=self._device
        )

    def _expect(self, op: Op) -> None:
        box = self._inbox_for(op)
        if box is not None:
            box.expect(self._input_signature(op))

    def _take(self, op: Op) -> Tensor | None:
        box = self._inbox_for(op)
        if box is None:
            return None
        with self._recorder.span("receive", micro_batch=op.micro_batch):
            return box.take(self._input_signature(op)).to(self._dtype)

    def _inbox_for(self, op: Op) -> TensorReceiver | None:
        if not self._is_sent(op):
            return None
        return self._inputs if op.kind == "F" else self._gradients

    def _input_signature(self, op: Op) -> Hashable:
        return self._signature(op, op.stage - 1 if op.kind == "F" else op.stage)

    def _signature(self, op: Op, stage: int) -> Hashable:
        """Return what the shape of the tensors after a stage depends on."""
        return (stage, self._signatures.get(op.micro_batch)) if self._of_module else ()

    def _count_nothing(self) -> ConsumedSamples:
        return ConsumedSamples(torch.zeros((), dtype=torch.float64, device=self._device))


def signature_of(batch: Any) -> Hashable:
    """Return the shapes of a batch's tensors."""
    return tuple(tuple(each.shape) for each in leaves_of(batch) if isinstance(each, Tensor))


def ignore_layer(_: int) -> None:
    """Do nothing: the layer's gradients are not summed yet."""
