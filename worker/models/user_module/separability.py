"""Checks that a module computes each sample alone, so that any micro batch may have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from simulator.documents.problems import InputError, Problem
from worker.data.batch_tree import leaves_of
from worker.models.loss import check_whole
from worker.models.random_numbers.generator_states import GeneratorStates
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.models.user_module.cut_module import BlockArguments, CutModule
from worker.models.user_module.kept_values import KeptValues, changed_value, kept_values
from worker.models.user_module.module_cut import kinds_of
from worker.models.user_module.module_layers import ModuleLayer, ModuleSource
from worker.models.user_module.module_skeleton import set_parameter

_TOLERANCE = 1e-3
_TOLERANCE_OF_LOSSES = 2e-5
"""Relative to the loss. Two samples whose losses are alike hide a mean over the labels of both:
a miss in about 1,000 draws. Rounding is a tenth of it."""
_TOLERANCE_OF_DOCUMENTS = 1e-6
"""Relative. Masked values count exactly zero times, so no sum is rounded differently."""
_TOLERANCE_OF_STAGES = 1e-5
"""Relative. Equal numbers are computed twice."""
_CURE = "a sample's result must depend on that sample alone, and collate must draw nothing"
_CURE_OF_LOSSES = (
    "return one value per sample, or a pair of a sum and a count: a mean is over other weights, "
    "masks or labels in each micro batch"
)


def check_separable(
    source: ModuleSource,
    make_batch: Callable[[Sequence[int]], Any],
    *,
    others: Sequence[int] = (),
    evaluated: Sequence[Any] = (),
    own_loss: bool = False,
) -> list[str]:
    """Compare two samples computed together with each computed alone, layer by layer.

    ``others`` are samples with other numbers of labels, or of another class, than the first one, of
    which only the loss is compared with it: a mean over the labels of both is not that of their
    means. ``evaluated`` is a sample of the evaluation, whose metrics are tried, or two of them
    together and then each alone. With ``own_loss`` the loss is compared with that which the module
    computes by itself from labels. Returns what is no mistake on one stage.
    """
    skeleton = source.skeleton()
    context = MicroBatchContext()
    layers = _layers(skeleton, source, context)
    buffers = {name: (each._version, each.clone()) for name, each in skeleton.named_buffers()}
    batches = [(samples, make_batch(samples)) for samples in ([0, 1], [0], [1])]
    found: list[list[Tensor]] = []
    kept: list[KeptValues] = []
    passed: list[BlockArguments] = []
    for samples, batch in batches:
        found.append(_compute_all(layers, batch, samples, context))
        kept.append(kept_values(skeleton))
        assert context.current is not None, "a pass has set it"
        passed.append(context.current.block_arguments)
    together, one_alone, two_alone = found
    notes: list[str] = []
    if changed_value(kept[1], kept[2]) is not None:
        notes = _judge_kept_values(layers, batches[1][1], one_alone, context)
    alone = (batches[1][1], one_alone), (batches[2][1], two_alone)
    cure = _CURE
    if one_alone[0].shape[1:] != two_alone[0].shape[1:]:
        cure += '; pad shorter ones at their end (padding_side="right" of a tokenizer)'
    for layer, both, one, two in zip(layers, together, one_alone, two_alone, strict=True):
        _compare(f"model: {source.cut.layer_name(layer.index)}", both, one, two, cure=cure)
    if own_loss and isinstance(batches[1][1], Mapping):
        _compare_with_own_loss(layers, batches[1][1], one_alone, context)
    for other in others:
        # What torch refuses is told in training, with the step.
        with suppress(IndexError, RuntimeError):
            sums = [
                _compute_all(layers, make_batch(samples), samples, context)[-1]
                for samples in ([0, other], [0], [other])
            ]
            totals = [total[:1] for total in sums]
            if bool(totals[0].isfinite()):  # Else the sample is bad, which training skips.
                _compare("loss", *totals, tolerance=_TOLERANCE_OF_LOSSES, cure=_CURE_OF_LOSSES)
    _check_metrics(layers, evaluated, context)
    _refuse_changed_buffers(skeleton, buffers)
    _refuse_second_values(source, layers, batches[1][1], one_alone, passed[1], context)
    return [*notes, *_find_unlike_shapes(source, layers, *alone)]


def _judge_kept_values(
    layers: list[ModuleLayer], batch: Any, before: Sequence[Tensor], context: MicroBatchContext
) -> list[str]:
    """Refuse a module whose results depend on earlier passes; note what changes without effect.

    How many passes there are, and over which samples, depends on the plan.
    """
    module = layers[0].module.module
    passes: list[list[Tensor]] = []
    kept: list[KeptValues] = []
    for _ in range(2):
        passes.append(_compute_all(layers, batch, [0], context))
        kept.append(kept_values(module))
    name = changed_value(*kept)
    if name is None:
        return []  # What it keeps depends on the last sample alone, as an activation does.
    for results in passes:
        for one, other in zip(before, results, strict=True):
            scale = max(float(one.abs().max()), 1e-6)
            if float((one - other).abs().max()) > _TOLERANCE_OF_STAGES * scale:
                what = f"computes a sample otherwise after other passes, and keeps {name}"
                cure = "keep nothing from pass to pass: the plan decides which passes a rank runs"
                raise InputError(Problem("model", what, cure))
    why = "and how many there are depends on the plan: let no result depend on it"
    return [f"model: {name} changes with every pass, {why}"]


def _compare_with_own_loss(
    layers: list[ModuleLayer], batch: Any, results: Sequence[Tensor], context: MicroBatchContext
) -> None:
    """Refuse another loss than the module itself computes when it gets labels, if it does."""

    def with_labels(module: nn.Module, given: Mapping[str, Any]) -> Any:
        return module(**given)

    current = MicroBatch(0, 0, torch.tensor([0]), inputs=batch)
    context.current = current
    try:
        with torch.no_grad():
            own = layers[-1].output(results[-2], current, with_labels).loss
    except Exception:  # It may want more than labels; then it computes no loss
        return
    total, count = results[-1].tolist()
    if not isinstance(own, Tensor) or own.dim() or not count or not bool(own.isfinite()):
        return
    mean = total / count
    if abs(float(own) - mean) > _TOLERANCE * max(abs(mean), 1e-6):
        what = f"is {mean:.6g} of the first sample by default, and the model itself computes"
        cure = "give loss=, a function of output and batch"
        raise InputError(Problem("loss", f"{what} {float(own):.6g} from its labels", cure))


def _check_metrics(
    layers: list[ModuleLayer], batches: Sequence[Any], context: MicroBatchContext
) -> None:
    """Refuse a metric whose mean over two samples is not that over each."""
    found = []
    for batch, samples in zip(batches, ([0, 1], [0], [1]), strict=False):
        with torch.no_grad():
            own = [0] if len(batches) == 1 else samples
            hidden, current = _compute_hidden(layers, batch, own, context)
            found.append(layers[-1].metrics(hidden[-1], current))
    if len(found) < 3:
        return
    for name in found[0]:
        (total, count), *alone = ([float(each) for each in sums[name]] for sums in found)
        counted = sum(each[1] for each in alone)
        if not count or not counted:
            continue
        both, apart = total / count, sum(each[0] for each in alone) / counted
        if abs(both - apart) > _TOLERANCE_OF_LOSSES * max(abs(both), abs(apart), 1e-6):
            what = f"of two samples together is {both:.6g}, and {apart:.6g} of each alone"
            cure = "return one value per sample, or a pair of a sum and a count"
            raise InputError(Problem("loss" if name == "loss" else f"metric {name}", what, cure))


def check_documents_apart(source: ModuleSource, one: Any, other: Any, *, first: int) -> None:
    """Compare two packed rows that differ in their first document, which has ``first`` tokens."""
    context = MicroBatchContext()
    layers = _layers(source.skeleton(), source, context)
    results = [_compute_all(layers, row, [0], context) for row in (one, other)]
    for mine, changed in zip(*(found[:-1] for found in results), strict=True):
        if mine.dim() < 3:
            continue  # It has no tokens.
        scale = max(float(mine.abs().max()), 1e-6)
        if float((mine - changed)[:, first:].abs().max()) > _TOLERANCE_OF_DOCUMENTS * scale:
            what = "lets documents of a packed row attend to one another"
            cure = "give a call= that makes a mask of segment_ids (segments=True), or sailor.pad"
            raise InputError(Problem("model", what, cure))


def _layers(
    skeleton: nn.Module, source: ModuleSource, context: MicroBatchContext
) -> list[ModuleLayer]:
    """Return the embedding, one block of each kind, and the head, with their weights."""
    module = CutModule(skeleton, source.cut, source.call)
    generators = GeneratorStates(skeleton)
    layers = [
        ModuleLayer(index, (), module, source, context, generators)
        for index in _pick_one_of_each(skeleton, source)
    ]
    for layer in layers:
        for name, index in source.cut.layer_of.items():
            if index == layer.index:
                value = source.value(name)
                # Rounding of 16-bit numbers would look like a mixture of samples.
                exact = torch.promote_types(value.dtype, torch.float32)
                set_parameter(skeleton, name, nn.Parameter(value.to(exact), requires_grad=False))
    for alias, first in source.cut.alias_of.items():
        set_parameter(skeleton, alias, skeleton.get_parameter(first))
    return layers


def _refuse_changed_buffers(skeleton: nn.Module, before: Mapping[str, tuple[int, Tensor]]) -> None:
    """Refuse a buffer that was added, removed, replaced by another value, or written to.

    torch counts no writes through ``.data``, so values are compared, too; and a write that happens
    to change no value counts as well.
    """
    after = dict(skeleton.named_buffers())
    for name in dict.fromkeys((*before, *after)):
        version, value = before.get(name, (0, None))
        now = after.get(name)
        if now is None or value is None or now._version != version or not _same_bits(now, value):
            what = f"the buffer {name} changes while the model computes"
            raise InputError(
                Problem("model", what, "keep it constant: ranks would not agree on it")
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors bit by bit: then not-a-number equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    bits = [each.detach().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def _pick_one_of_each(skeleton: nn.Module, source: ModuleSource) -> list[int]:
    """Return the embedding, one block of each kind, and the head, by their index."""
    cut = source.cut
    kinds = kinds_of(skeleton, cut.blocks)
    return [0, *(index + 1 for index in sorted(set(kinds))), cut.layers - 1]


def _compute_hidden(
    layers: list[ModuleLayer], batch: Any, samples: Sequence[int], context: MicroBatchContext
) -> tuple[list[Tensor], MicroBatch]:
    """Compute all layers but the head."""
    current = MicroBatch(0, 0, torch.tensor(samples), inputs=batch)
    context.current = current
    found = [torch.empty(0)]
    for layer in layers[:-1]:
        found.append(layer(found[-1]))
    return found[1:], current


def _compute_all(
    layers: list[ModuleLayer], batch: Any, samples: Sequence[int], context: MicroBatchContext
) -> list[Tensor]:
    """Compute all layers; the last result is the sum of the losses, and their number."""
    with torch.no_grad():
        found, current = _compute_hidden(layers, batch, samples, context)
        total, count = layers[-1].losses(found[-1], current), float(current.label_count)
    check_whole(count)
    sums = torch.stack((total.double(), torch.tensor(count)))
    return [each.detach() for each in (*found, sums)]


def _refuse_second_values(
    source: ModuleSource,
    layers: Sequence[ModuleLayer],
    batch: Any,
    results: Sequence[Tensor],
    passed: BlockArguments,
    context: MicroBatchContext,
) -> None:
    """Refuse a layer that is passed, or computes, something else where layer 0 is not held.

    There its weights are zeros, and the hidden state alone comes from the stage that holds it.
    Paths with a gradient were refused when the module was cut.
    """
    cut, skeleton = source.cut, layers[0].module.module
    tied = set(cut.alias_of.values())
    for name, number in cut.layer_of.items():
        if number == 0 and name not in tied:
            zeros = torch.zeros_like(skeleton.get_parameter(name))
            set_parameter(skeleton, name, nn.Parameter(zeros, requires_grad=False))
    current = MicroBatch(0, 0, torch.tensor([0]), inputs=batch)
    context.current = current
    with torch.no_grad():
        found = [layer(x).detach() for layer, x in zip(layers[1:-1], results, strict=False)]
        total = layers[-1].losses(results[-2], current)
    found.append(torch.stack((total.detach().double(), results[-1][1])))
    # What is passed may have hardly any effect with weights that are not trained yet.
    rests = zip(passed.rest, current.block_arguments.rest, strict=True)
    for index, both in enumerate(rests):
        one, other = ([e for e in leaves_of(rest) if isinstance(e, Tensor)] for rest in both)
        if not all(_same_bits(a, b) for a, b in zip(one, other, strict=False)):
            raise _second_value(cut.layer_name(index + 1))
    for layer, here, alone in zip(layers[1:], found, results[1:], strict=True):
        scale = max(float(alone.abs().max()), 1e-6)
        if float((here - alone).abs().max()) > _TOLERANCE_OF_STAGES * scale:
            raise _second_value(cut.layer_name(layer.index))


def _second_value(name: str) -> InputError:
    what = f"{name} uses what layer 0 computes beside the hidden state, as by detach()"
    cure = "compute it from the batch alone, or in each block from its hidden state"
    return InputError(Problem("model", what, cure))


def _find_unlike_shapes(
    source: ModuleSource,
    layers: Sequence[ModuleLayer],
    *runs: tuple[Any, Sequence[Tensor]],
) -> list[str]:
    """Name a layer whose outputs differ in shape though the tensors of both batches do not."""
    given = [[each.shape for each in leaves_of(b) if isinstance(each, Tensor)] for b, _ in runs]
    if not given[0] or given[0] != given[1]:
        return []
    for layer, one, two in zip(layers[:-1], *(results for _, results in runs), strict=False):
        if one.shape != two.shape:
            sizes = " and ".join(" x ".join(map(str, each.shape)) for each in (one, two))
            name = source.cut.layer_name(layer.index)
            return [
                f"{name} hands on {sizes} numbers for two batches of one shape: a plan of several "
                "stages will fail there; let shapes depend on those of the batch's tensors alone"
            ]
    return []


def _compare(
    place: str,
    both: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    tolerance: float = _TOLERANCE,
    cure: str = _CURE,
) -> None:
    if both.dim() == 1 and len(both) == len(first):
        alone = first + second  # The sum of the losses, and their number.
    elif len(both) != 2 or not both.shape[1:] == first.shape[1:] == second.shape[1:]:
        # Samples of different lengths are padded to another length together.
        return
    else:
        alone = torch.cat((first, second))
    scale = max(float(alone.abs().max()), 1e-6)
    error = float((both - alone).abs().max()) / scale
    if not error <= tolerance:
        what = f"computes two samples together otherwise than each alone (by {100 * error:.1g} %)"
        raise InputError(Problem(place, what, cure))
