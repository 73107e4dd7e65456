"""Parameters, bytes and seconds of each layer of a job, from its profile or its model.

A profile takes precedence over the model's own counts; if they differ by more than 2 %, every
estimate carries a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from simulator.arrays import Floats, Ints, prefix_sums
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.runtime_constants import RUNTIMES, Runtime, platform_of
from simulator.layer_costs.layer_times import LayerTimeTable
from simulator.layer_costs.live_times import Correction, corrected, factors_of
from simulator.layer_costs.profile import Profile
from simulator.layer_costs.roofline import LayerTimes, Roofline
from simulator.layer_costs.weight_part import kept_for_weights
from simulator.models.layers import FLOAT_BYTES, Layer, Model, Precision, Recompute
from simulator.network.network import Network
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.provenance import Provenance

_DIFFERENCE = 0.02
"""Relative difference of parameter counts from which a note is added."""
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")


class LayerCosts:
    """The layer costs of one job, each computed once and cached."""

    def __init__(
        self,
        job: Job,
        *,
        profile: Profile | None,
        catalogue: Catalogue,
        network: Network,
        hints: tuple[str, ...] = (),
        live: tuple[Correction, ...] = (),
    ) -> None:
        self.job = job
        self.sequence = job.model.tokens_of(job.sequence)
        if profile is not None and job.model.is_vision:
            # A vision model is measured on whole images, whatever sequence its job states.
            profile = replace(profile, sequence=self.sequence)
        self.hints = hints
        self._live = live
        self._corrected: dict[tuple[str, int, int], LayerTimes] = {}
        self.profile = profile
        self._catalogue, self._network = catalogue, network
        self.runtime: Runtime = RUNTIMES[job.runtime]
        self._layers = job.model.layers
        self.layer_count = len(self._layers)
        self._check_profile()
        roofline = self._roofline = Roofline(
            job.model,
            self.sequence,
            job.precision,
            job.uses_flash,
            catalogue,
            network,
            OPTIMIZER_MOMENTS[job.optimizer],
        )
        hooked = profile is not None and not profile.is_own
        self._times = LayerTimeTable(
            None if profile is None else _add_collectives(profile, roofline),
            roofline,
            catalogue,
            lambda gpu: platform_of(gpu).profiled_hook_s if hooked else 0.0,
        )
        self._rows: dict[object, Floats] = {}
        self._sums: dict[tuple[str, int, int], tuple[Floats, ...]] = {}

    def counted(self, model: Model) -> LayerCosts:
        """Return the costs of a variant of the model, counted and computed without a profile."""
        return LayerCosts(
            replace(self.job, model=model),
            profile=None,
            catalogue=self._catalogue,
            network=self._network,
        )

    def with_other_zero(self) -> LayerCosts:
        """Return the costs of the same job under the other ZeRO stage."""
        return LayerCosts(
            replace(self.job, zero=0 if self.job.zero else 1),
            profile=self.profile,
            catalogue=self._catalogue,
            network=self._network,
            hints=self.hints,
            live=self._live,
        )

    def _check_profile(self) -> None:
        profile = self.profile
        if profile is None or len(profile.layer_names) == self.layer_count:
            return
        model = self.job.model
        raise InputError(
            Problem(
                f"profile {profile.name}",
                f"has {len(profile.layer_names)} layers, but the model {model.name} has "
                f"{self.layer_count}: it was measured on another model",
                "name a profile of this model in [model] profile, or leave it out",
            )
        )

    # -- time -----------------------------------------------------------------------------------

    def times(self, gpu: str, *, tp: int, samples: int) -> LayerTimes:
        """Return the seconds per layer of one micro batch of ``samples`` samples."""
        plain = self._times.times(gpu, tp=tp, micro_batch=samples)
        if not self._live or self.profile is None or gpu not in self.profile.gpus():
            return plain
        key = (gpu, tp, samples)
        if key not in self._corrected:
            factors = factors_of(self._live, gpu, layers=self.layer_count)
            found = plain if factors is None else corrected(plain, factors, gpu=gpu)
            self._corrected[key] = found
        return self._corrected[key]

    def stage_seconds(
        self, gpu: str, *, tp: int, samples: int, layers: tuple[int, int], recompute: Recompute
    ) -> tuple[float, float]:
        """Return forward and backward seconds of a layer range; backward includes recomputation."""
        first, end = layers
        ahead, back = self.range_seconds(
            gpu,
            tp=tp,
            samples=samples,
            first=np.array([first]),
            end=np.array([end]),
            recompute=np.array([end - first if recompute == "full" else 0]),
        )
        return float(ahead[0]), float(back[0])

    def range_seconds(
        self, gpu: str, *, tp: int, samples: int, first: Ints, end: Ints, recompute: Ints
    ) -> tuple[Floats, Floats]:
        """Return ``stage_seconds`` of many ranges, of which ``recompute`` layers are recomputed."""
        key = (gpu, tp, samples)
        found = self._sums.get(key)
        if found is None:
            times = self.times(gpu, tp=tp, samples=samples)
            rows = times.forward, times.backward, self.again_by_layer(*key)
            found = self._sums[key] = tuple(map(prefix_sums, rows))
        forward, backward, repeated = found
        again: Floats = repeated[first + recompute] - repeated[first]
        return forward[end] - forward[first], backward[end] - backward[first] + again

    def again_by_layer(self, gpu: str, tp: int, samples: int) -> Floats:
        """Return the seconds to recompute each layer: none of embedding and head."""
        is_repeated = np.array([bool(layer.checkpoint) for layer in self._layers])
        return np.where(is_repeated, self.times(gpu, tp=tp, samples=samples).forward, 0.0)

    def backward_by_layer(self, gpu: str, *, tp: int, samples: int, recompute: Recompute) -> Floats:
        """Return the backward seconds of each layer, as in ``stage_seconds``."""
        times = self.times(gpu, tp=tp, samples=samples)
        if recompute == "none":
            return times.backward
        repeated: Floats = times.backward + self.again_by_layer(gpu, tp, samples)
        return repeated

    def weight_by_layer(self, gpu: str, *, tp: int, samples: int) -> Floats:
        """Return the seconds of each layer's backward that the gradient of its weights takes."""
        return self._row(
            ("weight", gpu, tp, samples),
            lambda: (
                self._roofline.weight_shares(gpu, tp=tp, micro_batch=samples)
                * self.times(gpu, tp=tp, samples=samples).backward
            ),
        )

    # -- parameters -----------------------------------------------------------------------------

    def parameters(self, tp: int) -> Floats:
        """Return the parameters of each layer on one TP rank."""
        return self._row(("parameters", tp), lambda: self._parameters(tp))

    def _parameters(self, tp: int) -> Floats:
        profile = self.profile
        if profile is None or not profile.sizes:
            return np.array([float(layer.parameters(tp)) for layer in self.job.model.layers])
        if tp in profile.sizes:
            return np.array(profile.sizes[tp].parameters, dtype=float)
        known = sorted(profile.sizes)
        if len(known) == 1:
            here, there = (
                np.array([float(layer.parameters(each)) for layer in self._layers])
                for each in (tp, known[0])
            )
            # A layer whose weights are all frozen has none to scale.
            ratio = np.divide(here, there, out=np.ones_like(here), where=there > 0)
            scaled: Floats = np.array(profile.sizes[known[0]].parameters, dtype=float) * ratio
            return scaled
        # Solve p(t) = split / t + replicated from two measured degrees.
        low, high = known[0], known[-1]
        at_low = np.array(profile.sizes[low].parameters, dtype=float)
        at_high = np.array(profile.sizes[high].parameters, dtype=float)
        split = (at_low - at_high) / (1 / low - 1 / high)
        row: Floats = split / tp + (at_low - split / low)
        return row

    def tied_parameters(self, tp: int) -> float:
        """Return the parameters per TP rank that the head shares with the embedding.

        Models in published profiles share none.
        """
        if self.profile is not None and self.profile.sizes and not self.profile.is_own:
            return 0.0
        tied = (t for t in self._layers[-1].tensors if t.tied_to is not None and not t.frozen)
        return float(sum(tensor.rank_elements(tp) for tensor in tied))

    def frozen_bytes(self, tp: int, *, gpu: str | None = None) -> Floats:
        """Return the bytes of each layer's frozen parameters on one TP rank."""
        width = FLOAT_BYTES[self.precision_on(gpu)]
        return self._row(
            ("frozen", tp, width),
            lambda: np.array([float(width * each.frozen_parameters(tp)) for each in self._layers]),
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element on the wire."""
        if self.job.precision == "fp32":
            return 4
        return self.job.gradient_bytes or self.runtime.gradient_bytes_16bit

    @property
    def has_owners(self) -> bool:
        """Whether ZeRO-1 gives each part of a layer one owner, not all holders equal shares."""
        return self.job.zero == 1 and self.runtime.zero1_by_bucket

    # -- activations ----------------------------------------------------------------------------

    def precision_on(self, gpu: str | None) -> Precision:
        """Return the format in which a GPU kind computes; ``None``: one that has the job's."""
        job = self.job.precision
        return job if gpu is None else self._catalogue.gpu(gpu).computes_in(job)

    def output_bytes(self, layer: int) -> float:
        """Return the bytes per sample that the boundary after a layer carries (all TP ranks).

        They travel in the job's precision, also from and to GPUs that compute in another.
        """
        width = FLOAT_BYTES[self.job.precision]
        profile = self.profile
        if profile is not None and 1 in profile.sizes and not self.job.model.is_vision:
            scale = self.sequence / profile.sequence
            return width * scale * profile.sizes[1].output_elements[layer]
        return float(width * self._layers[layer].output_elements(self.sequence))

    def kept_bytes(
        self, *, tp: int, samples: int, recompute: Recompute, gpu: str | None = None
    ) -> Floats:
        """Return the bytes that each layer keeps on one TP rank from forward until backward.

        ``gpu`` is the kind that computes; ``None``: one that has the job's precision.
        """
        precision = self.precision_on(gpu)
        return self._row(
            ("kept", tp, samples, recompute, precision),
            lambda: self._kept_bytes(tp, samples, recompute, precision),
        )

    def _kept_bytes(
        self, tp: int, samples: int, recompute: Recompute, precision: Precision
    ) -> Floats:
        modelled = self._model_bytes("kept_bytes", tp, samples, recompute, precision)
        profile = self.profile
        if profile is None or not profile.sizes:
            return modelled
        if recompute == "full":
            whole = self._kept_bytes(tp, samples, "none", precision)
            # Layers that are not recomputed keep the measured bytes; recomputed ones keep no more.
            recomputed = np.array([bool(layer.checkpoint) for layer in self._layers])
            return np.where(recomputed, np.minimum(whole, modelled), whole)
        exact = self._measured_bytes("kept_bytes", tp, samples, precision)
        if exact is not None:
            return exact
        degree = tp if tp in profile.sizes else min(profile.sizes, key=lambda t: (abs(t - tp), t))
        measured = 4.0 * samples * np.array(profile.sizes[degree].kept_elements, dtype=float)
        there = self._find_profiled_precision(profile)
        # Published profiles do not reliably state whether flash attention was on.
        flash = profile.flash_attention if profile.is_own else self.job.uses_flash
        same = degree == tp and profile.sequence == self.sequence and there == precision
        if same and flash == self.job.uses_flash:
            return measured
        reference = self._model_bytes(
            "kept_bytes", degree, samples, recompute, there, profile.sequence, flash=flash
        )
        ratio = np.divide(modelled, reference, out=np.ones_like(modelled), where=reference > 0)
        return measured * ratio

    def host_bytes_per_s(self, gpu: str) -> float | None:
        """Return what a GPU copies to or from its host's memory; ``None``: it is not known."""
        return self._catalogue.gpu(gpu).host_bytes_per_s

    def copies_by_layer(self, gpu: str, *, tp: int, samples: int) -> Floats:
        """Return the seconds in which a rank copies what each layer keeps to or from its host."""
        rate = self.host_bytes_per_s(gpu)
        assert rate is not None, f"{gpu} offloads, and its link to the host is not known"
        seconds: Floats = self.kept_bytes(tp=tp, samples=samples, recompute="none", gpu=gpu) / rate
        return seconds

    def kept_for_weights(self, *, tp: int, samples: int, gpu: str | None = None) -> Floats:
        """Return the bytes of each layer on one TP rank between the parts of a divided backward."""
        precision = self.precision_on(gpu)
        flash, sequence = self.job.uses_flash, self.sequence

        def kept(layer: Layer) -> float:
            return kept_for_weights(
                layer,
                micro_batch=samples,
                sequence=sequence,
                tp=tp,
                precision=precision,
                flash=flash,
            )

        return self._row(
            ("kept for weights", tp, samples, precision),
            lambda: np.array([kept(layer) for layer in self._layers]),
        )

    def workspace_bytes(
        self, *, tp: int, samples: int, recompute: Recompute, gpu: str | None = None
    ) -> Floats:
        """Return the transient bytes of each layer on one TP rank, beyond the kept ones."""
        precision = self.precision_on(gpu)
        return self._row(
            ("workspace", tp, samples, recompute, precision),
            lambda: self._workspace(tp, samples, recompute, precision),
        )

    def _workspace(
        self, tp: int, samples: int, recompute: Recompute, precision: Precision
    ) -> Floats:
        modelled = self._model_bytes("workspace_bytes", tp, samples, recompute, precision)
        profile = self.profile
        measured = self._measured_bytes("transient_bytes", tp, samples, precision)
        if measured is not None:
            if recompute == "none":
                return measured
            whole, left = (self._kept_bytes(tp, samples, how, precision) for how in _RECOMPUTES)
            restored: Floats = measured + np.maximum(whole - left, 0.0)
            return restored
        if profile is not None and not profile.config.get("head_has_vocab_projection", True):
            # The profiled head computes no logits, even if the preset's does.
            modelled = modelled.copy()
            widened = FLOAT_BYTES[precision] / FLOAT_BYTES[self.job.precision]
            modelled[-1] = 2 * widened * self.output_bytes(self.layer_count - 2) * samples
        return modelled

    def _measured_bytes(
        self,
        what: Literal["kept_bytes", "transient_bytes"],
        tp: int,
        samples: int,
        precision: Precision,
    ) -> Floats | None:
        """Return measured bytes if they were measured under the job's conditions."""
        profile = self.profile
        if profile is None or profile.sequence != self.sequence:
            return None
        if profile.flash_attention != self.job.uses_flash:
            return None
        computes_in = self._find_precisions(profile)
        gpus = [gpu for gpu in profile.gpus() if computes_in[gpu] == precision]
        return profile.measured_bytes(what, gpus=gpus, tp=tp, samples=samples)

    def _find_precisions(self, profile: Profile) -> dict[str, Precision]:
        """Return the formats in which the GPU kinds of a profile were measured."""
        kinds = profile.gpus()
        return {gpu: self._catalogue.gpu(gpu).computes_in(profile.precision) for gpu in kinds}

    def _find_profiled_precision(self, profile: Profile) -> Precision:
        """Return the format of a profile's element counts: the one in which all its GPU kinds
        compute, else the profile's own.
        """
        formats = set(self._find_precisions(profile).values())
        return formats.pop() if len(formats) == 1 else profile.precision

    def _model_bytes(
        self,
        what: str,
        tp: int,
        samples: int,
        recompute: Recompute,
        precision: str,
        sequence: int | None = None,
        *,
        flash: bool | None = None,
    ) -> Floats:
        method = getattr(Layer, what)
        known: dict[tuple[int, int, int], float] = {}
        found = []
        for layer in self._layers:
            # Equal blocks share their terms.
            key = id(layer.kept), id(layer.checkpoint), id(layer.moments)
            if key not in known:
                known[key] = method(
                    layer,
                    micro_batch=samples,
                    sequence=sequence or self.sequence,
                    tp=tp,
                    precision=precision,
                    recompute=recompute,
                    flash=self.job.uses_flash if flash is None else flash,
                )
            found.append(known[key])
        return np.array(found)

    # -- cache, notes and provenance ------------------------------------------------------------

    def _row(self, key: object, make: Callable[[], Floats]) -> Floats:
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = make()
        return found

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes for every estimate of this job."""
        profile = self.profile
        notes = list(self.hints)
        if profile is None or not profile.sizes:
            return tuple(notes)
        if profile.flash_attention != self.job.uses_flash:
            with_or_without = "with" if profile.flash_attention else "without"
            used = "times" if profile.is_own else "times and activations"
            notes.append(
                f"profile {profile.name} was measured {with_or_without} flash attention; its "
                f"{used} are used although the job differs"
            )
        mine = self.job.model.parameters
        if 1 in profile.sizes and not profile.is_own:
            theirs = sum(profile.sizes[1].parameters)
            if abs(theirs - mine) > _DIFFERENCE * mine:
                notes.append(
                    f"profile {profile.name} has {theirs:,} parameters, the model "
                    f"{self.job.model.name} {mine:,}; the profile's count is used"
                )
        return tuple(notes)

    def provenance(self, gpu: str, *, tp: int, samples: int) -> Provenance:
        """Return the provenance of ``times``."""
        return self.times(gpu, tp=tp, samples=samples).provenance


def _add_collectives(profile: Profile, roofline: Roofline) -> Profile:
    """Add the TP all-reduces to timings that were measured without them."""
    there = roofline.under(sequence=profile.sequence, precision=profile.precision)
    timings = dict(profile.timings)
    for (gpu, tp, micro_batch), timing in profile.timings.items():
        if timing.collectives == "inside" or tp == 1:
            continue
        demand = there.demand(gpu, tp=tp, micro_batch=micro_batch)
        factor = there.calibration(gpu).collective_factor
        timings[gpu, tp, micro_batch] = replace(
            timing,
            forward_s=timing.forward_s + factor * demand.collectives_forward_s,
            backward_s=timing.backward_s + factor * demand.collectives_backward_s,
            notes=(*timing.notes, f"{gpu} TP {tp}: all-reduces computed from the links"),
        )
    return replace(profile, timings=timings)
