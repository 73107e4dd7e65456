"""What a user's script gives for training: the model, the data, the loss, and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simulator.documents.problems import InputError, Problem
from simulator.models.layers import Model, Precision
from simulator.spec.job import Data, Job, ParameterGroup, RecomputePolicy
from worker.data.batch import DataSource
from worker.data.datasets.blend import Blend
from worker.data.datasets.map_dataset import (
    Collate,
    Dataset,
    MapData,
    as_batch,
    default_collate,
    sizes_of,
)
from worker.data.datasets.packing import Packed
from worker.data.generator_turns import turn
from worker.data.sample_checks import check_sample, limits_of
from worker.models.apply_plan import Metrics
from worker.models.random_numbers.microbatch_context import batch_on_device
from worker.models.user_module.cut_module import CutModule, ignore_checkpoints
from worker.models.user_module.describe_module import describe_module
from worker.models.user_module.module_cut import CutError, ModuleCut, find_cut
from worker.models.user_module.module_skeleton import without_values
from worker.models.user_module.module_splits import ModuleSplits, find_splits
from worker.models.user_module.parameter_uses import refused_uses
from worker.models.user_module.separability import check_documents_apart, check_separable
from worker.models.user_module.split_check import check_splits
from worker.reporting.loggers import Logger
from worker.script.first_samples import Lengths, unlike_first
from worker.script.hf_model import source_folder
from worker.script.losses import Loss, default_loss, sum_and_count, tried_at_first, widened
from worker.script.model_watch import ModelWatch
from worker.script.prepare_module import prepared, refuse_without_gradients
from worker.script.save_module import fill, save_filled
from worker.script.script_reports import Callback, ScriptReports
from worker.script.script_settings import settings_digests
from worker.script.torch_settings import (
    OptimizerSettings,
    default_optimizer,
    refuse_hooks,
    settings_of,
)
from worker.training.full_tensors import TensorKey


@dataclass(frozen=True)
class Recipe:
    """Everything that a script gives; what a plan needs is found out from it."""

    model: nn.Module | Callable[[], nn.Module]
    dataset: Dataset
    batch_size: int
    samples: DataSource | None = None
    """What is trained on instead of ``dataset``."""
    loss: Loss | None = None
    call_module: Callable[[nn.Module, Any], Any] | None = None
    collate: Collate = default_collate
    steps: int | None = None
    given_settings: OptimizerSettings | None = None
    """Settings that are known without an optimizer: those of a job file."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    skip_nonfinite: int = 3
    precision: Precision = "fp32"
    recompute: RecomputePolicy = "auto"
    max_tp: int = 8
    seed: int = 0
    shuffled: bool = True
    drop_last: bool = False
    """Whether an epoch leaves out the samples that would not fill a batch."""
    num_workers: int = 0
    """In how many processes each rank loads samples; 0: in a thread."""
    ignored: tuple[str, ...] = ()
    """What the script asks for and Sailor does not do, to be noted once."""
    eval_dataset: Dataset | None = None
    eval_collate: Collate | None = None
    """How batches of ``eval_dataset`` are made, if not as those of ``dataset``."""
    eval_every: int | None = None
    more_metrics: Mapping[str, Loss] = field(default_factory=dict)
    loggers: tuple[Logger, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    name: str = "job"
    is_alone: bool = False
    """Whether this process is the only one that ever trains the job."""

    _caching: list[Any] = field(default_factory=list, repr=False)
    """Configurations whose cache was switched off."""
    _changed: list[str] = field(default_factory=list, repr=False)
    """Changes to the module that the script has not asked for."""
    _untried: list[str] = field(default_factory=list, repr=False)
    """Blocks whose splits were not tried by numbers."""

    # -- the module --------------------------------------------------------------------------------

    @cached_property
    def _module(self) -> nn.Module:
        """The module with its initial weights."""
        if isinstance(self.model, nn.Module):
            module = self.model
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                module = self.model()
        module, notes, caching = prepared(module)
        self._changed.extend(notes)
        self._caching.extend(caching)
        return module

    @cached_property
    def _values(self) -> Mapping[str, Tensor]:
        return {name: each.detach() for name, each in self._module.named_parameters()}

    def skeleton(self) -> nn.Module:
        """Make the module with zeros that take no memory as its parameters."""
        self.refuse_changes()
        return without_values(self._first_skeleton, shared=self._module.parameters())

    def refuse_changes(self) -> None:
        """Raise ``InputError`` if a callback has changed what ranks would copy now."""
        if "_reports" in vars(self):
            self._reports.watch.refuse_changes()

    @cached_property
    def _first_skeleton(self) -> nn.Module:
        """A copy of the module from before training, whose parts in evaluation stay in it."""
        self._values  # noqa: B018 - keep the values before the module is changed
        return without_values(self._module)

    def value(self, name: str) -> Tensor:
        """Return the initial value of a parameter."""
        return self._values[name]

    @cached_property
    def cut(self) -> ModuleCut:
        """Where the module is cut."""
        if getattr(getattr(self._module, "config", None), "output_router_logits", False):
            what = "has output_router_logits, whose auxiliary loss mixes samples"
            raise InputError(Problem("model", what, "set it to false in the model's config"))
        wanted = {id(p): name for name, p in self._parameters.items() if p.requires_grad}
        cure = "register it where it is used, so that a copy of the model has it, too"
        skeleton, example = self.skeleton(), self._example(1)
        ignore_checkpoints()  # One around a head would hide its parameters from autograd.
        try:
            with refused_uses("model", wanted, cure):
                return find_cut(skeleton, self.call, example)
        except CutError as error:
            wrong = re.search("unexpected keyword argument|required positional arg", str(error))
            how = "give call=, which hands a batch to the module"
            cure = how if wrong else "see docs/own-model.md"
            what = f"cannot be cut into stages: {error}"
            raise InputError(Problem("model", what, cure)) from None

    @cached_property
    def splits(self) -> ModuleSplits:
        """Which parts of its blocks may be split."""
        module = CutModule(self.skeleton(), self.cut, self.call)
        return find_splits(module, self._example(1), most=self.max_tp)

    def call(self, module: nn.Module, batch: Any) -> Any:
        """Call the module with a batch, without labels if it is a mapping or a tuple."""
        if self.call_module is not None:
            return self.call_module(module, batch)
        if isinstance(batch, Mapping):
            return module(**{key: value for key, value in batch.items() if key != "labels"})
        return module(batch[0] if isinstance(batch, tuple) else batch)

    # -- the optimizer -----------------------------------------------------------------------------

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return (self.make_optimizer or default_optimizer)(self._module)

    @cached_property
    def settings(self) -> OptimizerSettings:
        """The optimizer's settings."""
        if self.given_settings is not None:
            return self.given_settings
        optimizer = self._optimizer
        own = {id(each) for each in self._module.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            what = "has parameters that are not the model's"
            cure = "give a function from the module to its optimizer"
            raise InputError(Problem("optimizer", what, cure))
        scheduler = None if self.make_scheduler is None else self.make_scheduler(optimizer)
        assert self.steps is not None, "checked before"
        return settings_of(optimizer, scheduler, steps=self.steps)

    def schedules(self, step: int) -> tuple[float, ...]:
        """Return the factor of each schedule on the learning rate at a step."""
        known = self.settings.schedules
        return tuple(factors[min(step, len(factors) - 1)] for factors in known) or (1.0,)

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter is trained: with a gradient, in the optimizer, and in use."""
        parameter, groups = self._parameters[name], self.settings.groups
        return (
            parameter.requires_grad
            and (groups is None or id(parameter) in groups)
            and name not in self.cut.unused
        )

    def group_of(self, name: str) -> ParameterGroup:
        """Return the optimizer's settings of a parameter."""
        groups = self.settings.groups
        return ParameterGroup() if groups is None else groups[id(self._parameters[name])]

    @cached_property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def take_back(self, tensors: Mapping[TensorKey, Tensor]) -> None:
        """Give the module of the script its trained weights."""
        with torch.no_grad():
            for (layer, name, kind), value in tensors.items():
                if kind == "master":
                    full = self.cut.full_name(max(layer, 0), name)
                    self._parameters[full].copy_(value)
        vars(self).pop("_reports", None)  # From here on the script may change them.

    def save(self, tensors: Mapping[tuple[int, str], Tensor], folder: Path) -> None:
        """Write full tensors, keyed by layer and name, as the module's library would."""
        self._module  # noqa: B018 - making it switches the caches off
        self.switch_caches(on=True)
        module = without_values(self._module)  # With the cache in its config.
        self.switch_caches(on=False)
        trained = {
            self.cut.full_name(layer, name): value for (layer, name), value in tensors.items()
        }
        fill(module, self.cut, lambda name: trained[name] if name in trained else self.value(name))
        save_filled(module, folder, self.source)

    def switch_caches(self, *, on: bool) -> None:
        """Let the parts that cached keys and values do so again, or no more."""
        for config in self._caching:
            config.use_cache = on

    @property
    def source(self) -> Path | None:
        """The local folder of the model of transformers that training starts from."""
        config: Any = getattr(self._module, "config", None)
        name = getattr(config, "name_or_path", "")
        return source_folder(name) if name else None

    @property
    def config(self) -> dict[str, Any] | None:
        """The config of a model of transformers."""
        found: Any = getattr(self._module, "config", None)
        return found.to_dict() if hasattr(found, "to_dict") else None

    # -- the loss ----------------------------------------------------------------------------------

    def losses(self, output: Any, batch: Any) -> tuple[Tensor, int | Tensor]:
        """Return the sum of the losses of a micro batch, and over how many it is."""
        output = widened(output)
        logits = getattr(output, "logits", output)
        is_computed = isinstance(logits, Tensor) and logits.device.type != "meta"
        if self.loss is None and "labels" not in self.limits and is_computed:
            # Later ones are checked when they are loaded, without waiting for the device.
            self.limits["labels"] = logits.shape[-1]
            check_sample(batch, {"labels": logits.shape[-1]}, "dataset: a sample")
        return sum_and_count(self._loss(output, batch), batch)

    @cached_property
    def _loss(self) -> Loss:
        return tried_at_first("loss", self.loss or default_loss(self._module), self._trained)

    @cached_property
    def _metrics(self) -> Mapping[str, Loss]:
        return {
            name: tried_at_first(f"metric {name}", metric, self._trained)
            for name, metric in self.more_metrics.items()
        }

    @cached_property
    def _trained(self) -> Mapping[int, str]:
        """The names of the script's trained parameters, by their ``id``."""
        return {id(p): name for name, p in self._parameters.items() if self.is_trained(name)}

    # -- what it tells -----------------------------------------------------------------------------

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics of an evaluation."""
        return ("loss", *self.more_metrics)

    def metrics(self, output: Any, batch: Any) -> Metrics:
        """Return the loss and other metrics of an evaluation, each as a sum and a count."""
        output = widened(output)
        # A metric may draw random numbers, which must not disturb those of a sample being loaded.
        with turn():
            found = {"loss": self.losses(output, batch)}
            for name, metric in self._metrics.items():
                found[name] = sum_and_count(metric(output, batch), batch, f"metric {name}")
        return found

    def evaluation_after(self, step: int) -> MapData | None:
        """Return the data of the evaluation that follows a step, if one does; the last one does."""
        is_due = step + 1 == self.steps or (step + 1) % (self.eval_every or self.steps or 1) == 0
        if self.eval_dataset is None or not is_due:
            return None
        collate = self.eval_collate or self.collate
        about = self.eval_dataset, collate, self.batch_size, self.seed
        return MapData(*about, shuffled=False, limits=self.limits, name="eval_dataset")

    @cached_property
    def _reports(self) -> ScriptReports:
        used: dict[str, Any] = {f"metric {name}": each for name, each in self.more_metrics.items()}
        used |= {"the loss": self.loss, "call": self.call_module, "collate": self.collate}
        used |= {"the data set": self.dataset}
        watch = ModelWatch(self._module, self._optimizer)
        about = self.loggers, self.callbacks, watch, self._trained
        return ScriptReports(*about, used, is_alone=self.is_alone)

    def report(self, step: int, values: Mapping[str, float]) -> str:
        """Hand figures to loggers and callbacks; return why loggers are not used any more."""
        # Callbacks may draw random numbers, which must not disturb those of a sample being loaded.
        with turn():
            return self._reports.report(step, values)

    def end_report(self) -> None:
        """Close the loggers: no more figures come."""
        with turn():
            self._reports.end()

    # -- data and job ------------------------------------------------------------------------------

    def data(self, sizes: tuple[int, ...] | None = None) -> DataSource:
        """Return the data; ``sizes`` are those of the job's data sets when it began."""
        if self.samples is not None:
            return self.samples
        about = self.dataset, self.collate, self.batch_size, self.seed, self.shuffled
        drop_last = self.drop_last
        return MapData(*about, drop_last, sizes=sizes or (), limits=self.limits)

    @cached_property
    def limits(self) -> dict[str, int]:
        """What tokens and labels are below, as far as that is known."""
        return limits_of(self._module, labels=self.loss is None)

    def _example(self, samples: int) -> Any:
        """Return the first samples, with numbers of the module's type as in training."""
        return self._convert(self.examples(range(samples)))

    def _load_for_check(self, indices: Sequence[int]) -> Any:
        """Return these samples for a check that computes in 32 bits at least."""
        return self._convert(self.examples(indices), exact=True)

    def _convert(self, batch: Any, *, exact: bool = False) -> Any:
        dtype = torch.promote_types(self._dtype, torch.float32) if exact else self._dtype
        return batch_on_device(batch, of_module=True, dtype=dtype, device=torch.device("cpu"))

    @property
    def _dtype(self) -> torch.dtype:
        """The type of the module's first parameter of floats."""
        floats = (each.dtype for each in self._values.values() if each.is_floating_point())
        return next(floats, torch.float32)

    def examples(self, indices: Sequence[int]) -> Any:
        """Return a batch of these samples."""
        return self._in_order.batch(0, indices).inputs

    @property
    def _in_order(self) -> DataSource:
        """The data, not shuffled and opened anew."""
        if self.samples is not None:
            return self.samples
        if 0 in sizes_of(self.dataset):
            raise InputError(Problem("dataset", "is empty", "give at least one sample"))
        about = self.dataset, self.collate, self.batch_size, self.seed
        return MapData(*about, shuffled=False, limits=self.limits)

    def job(self) -> Job:
        """Check the module, and return the job with the model described by tracing it."""
        if not any(map(self.is_trained, self.cut.layer_of)):
            what = "has no parameter that is trained"
            raise InputError(Problem("optimizer", what, "give it parameters with requires_grad"))
        refuse_hooks({name: self._parameters[name] for name in self._trained.values()})
        refuse_without_gradients(self.cut, self._trained.values())
        others = [] if self.loss is None else unlike_first(self._in_order, self._looked_at)
        found = check_separable(
            self,
            self._load_for_check,
            others=others,
            evaluated=self._load_evaluated(),
            own_loss=self.loss is None and self.call_module is None,
        )
        self._changed[:] = dict.fromkeys([*self._changed, *found])
        parts = self.dataset.parts if isinstance(self.dataset, Blend) else ()
        for dataset in (self.dataset, *(part.dataset for part in parts)):
            twins = dataset.twins() if isinstance(dataset, Packed) else None
            if twins is not None:
                one, other, first = twins
                rows = [as_batch(self.collate([row])) for row in (one, other)]
                check_documents_apart(self, *rows, first=first)
        job = Job(
            name=self.name,
            model=self._describe(),
            global_batch=self.batch_size,
            sequence=1,
            precision=self.precision,
            recompute=self.recompute,
            max_tp=self.splits.max_tp,
            optimizer=self.settings.optimizer,
            steps=self.steps,
            learning_rate=self.settings.learning_rate,
            update=self.settings.update,
            clip_norm=self.clip_norm,
            skip_nonfinite=self.skip_nonfinite,
            data=Data(
                seed=self.seed,
                samples=sizes_of(self.dataset) or None,
                num_workers=self.num_workers,
            ),
        )
        self._untried[:] = check_splits(self, job, self._example(1))
        return job

    def settings_digests(self) -> dict[str, int]:
        """Return digests of the settings that the described job does not hold."""
        groups = {name: self.group_of(name) for name in self._trained.values()}
        order = {"shuffle": self.shuffled, "drop_last": self.drop_last}
        count = None if self.eval_dataset is None else sizes_of(self.eval_dataset)
        about = {"eval_every": self.eval_every, "metrics": self.metric_names}
        more = {"number of samples to evaluate": count}
        return settings_digests(groups, self.settings.schedules, **order, **about, **more)

    def _load_evaluated(self) -> list[Any]:
        """Load a batch of the evaluation, and return samples for a check of its metrics."""
        data = None if self.steps is None else self.evaluation_after(self.steps - 1)
        if data is None or not data.batches():
            return []
        data.batch(0, range(min(8, self.batch_size, *sizes_of(data.dataset))))
        if not self.more_metrics:
            return []
        others = unlike_first(data, min(sizes_of(data.dataset) or (1,)))[:1]
        chosen = [[0, *others], [0], others] if others else [[0]]
        batches = (data.batch(0, each).inputs for each in chosen)
        return [self._convert(each, exact=True) for each in batches]

    @property
    def _looked_at(self) -> int:
        """How many samples there are to look at; a stream has at least those of a batch."""
        return min(sizes_of(self.dataset) or (self.batch_size,))

    @cached_property
    def _lengths(self) -> Lengths:
        """How long the first samples are; those of a job file have one length."""
        given = self.samples is not None
        return Lengths() if given else Lengths.of(self._in_order, self._looked_at)

    def longest_examples(self, samples: int) -> Any:
        """Return a batch of ``samples`` copies of the longest of the first samples."""
        return self.examples([self._lengths.longest] * samples)

    def changes(self) -> list[str]:
        """Return what is not done as the script says."""
        unused = [
            f"no result depends on {name} in a pass over one sample, so it keeps its value"
            for name in sorted(self.cut.unused)
            if self._parameters[name].requires_grad
        ]
        return [*self.ignored, *self._changed, *unused]

    def notes(self) -> list[str]:
        """Return what a user may not expect: also blocks kept whole."""
        found = [*self.changes(), *self._lengths.notes]
        if self.splits.why_not_more:
            found.append(f"planned without tensor parallelism: {self.splits.why_not_more}")
        for path in self._untried:
            what = f"the splits of {path} could not be tried by numbers before training"
            found.append(f"{what}; compare losses with those of max_tp=1")
        if self.splits.experts:
            found.append(f"every rank of a stage computes {self.splits.experts} in full")
        return found

    def _describe(self) -> Model:
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return describe_module(
            CutModule(self.skeleton(), self.cut, self.call),
            self.name,
            lambda samples: self._convert(self.longest_examples(samples)),
            lambda output, batch: self.losses(output, batch)[0],
            is_trained=self.is_trained,
            splits=self.splits,
            dtype=dtypes[self.precision],
        )
