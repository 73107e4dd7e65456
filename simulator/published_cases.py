"""Measured runs in the form of the SOSP'25 artefact: one table of stages for all pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError, Problem, Problems, malformed
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.runtime_constants import RUNTIMES
from simulator.layer_costs.profile import Profile
from simulator.models.families import build_model
from simulator.models.layers import PRECISIONS, Model, Recompute
from simulator.models.transformer_block import MEGATRON
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

UNKNOWN_RUNTIME = "megatron-deepspeed"
"""Runtime that is assumed for those that are not modelled; the estimate has a note."""


def profiled_model(profile: Profile, *, family: str = "opt", sequence: int | None = None) -> Model:
    """Build the profiled model from the numbers in its profile."""
    config = profile.config
    try:
        return build_model(
            family,
            name=profile.name,
            kernels=MEGATRON,
            layers=int(config["transformer_layers"]),
            hidden=int(config["hidden"]),
            heads=int(config["heads"]),
            ffn=int(config["ffn_hidden"]),
            vocab=int(config["vocab_padded"]),
            sequence=sequence or profile.sequence,
            tied=False,
        )
    except (KeyError, TypeError) as error:
        raise InputError(malformed(f"profile {profile.name}: config", error, "profile")) from None


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """One measured run."""

    identifier: str
    source: str
    model: str
    runtime: str
    sequence: int
    precision: str
    recompute: str
    optimizer: str
    zero: int
    gpus_per_node: int
    micro_batch_size: int
    global_batch: int
    stages: tuple[tuple[tuple[int, int], tuple[tuple[str, int, str], ...]], ...]
    """Per stage: its layers, and (GPU kind, TP, zone) of each replica."""
    time_s: float | None
    memory_bytes: float | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, raw: object, where: str) -> PublishedCase:
        problems = Problems()
        try:
            return cls._read(raw, where, problems)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(malformed(where, error, "validation cases")) from None

    @classmethod
    def _read(cls, raw: Any, where: str, problems: Problems) -> PublishedCase:
        plan, flags = raw["plan"], raw.get("flags", {})
        stages = []
        for index, stage in enumerate(plan["stages"]):
            layers = list(stage["layers"])
            if layers != list(range(layers[0], layers[-1] + 1)):
                problems.add(f"{where}.plan.stages[{index}].layers", "must be consecutive")
            replicas = tuple(
                (_text(r["gpu_type"]), _count(r["tp"]), _text(r["zone"])) for r in stage["replicas"]
            )
            if not replicas:
                problems.add(f"{where}.plan.stages[{index}].replicas", "is empty")
            stages.append(((layers[0], layers[-1] + 1), replicas))
        if len({len(replicas) for _, replicas in stages}) != 1:
            problems.add(f"{where}.plan.stages", "must all have the same number of replicas")
        problems.raise_if_any()
        named = str(raw.get("runtime", "sailor")).lower()
        runtime = named if named in RUNTIMES else UNKNOWN_RUNTIME
        notes = () if named in RUNTIMES else (f"runtime {named}: estimated as {UNKNOWN_RUNTIME}",)
        memory = raw.get("measured_peak_memory_bytes") or {}
        return cls(
            identifier=str(raw["id"]),
            source=str(raw.get("source", "")),
            model=_text(raw["model"]),
            runtime=runtime,
            sequence=_count(raw["seq_len"]),
            precision=_one_of(raw, "precision", PRECISIONS),
            recompute=_one_of(raw, "recompute", ("none", "full")),
            optimizer=_one_of(raw, "optimizer", tuple(OPTIMIZER_MOMENTS)),
            zero=int(_one_of(raw, "zero_stage", ("0", "1"))),
            gpus_per_node=_count(raw["gpus_per_node"]),
            micro_batch_size=_count(plan["micro_batch_size"]),
            global_batch=_count(plan["global_batch_size"]),
            stages=tuple(stages),
            time_s=_read_measured(raw.get("measured_iter_time_s"), flags.get("time_valid", True)),
            notes=notes,
            memory_bytes=_read_measured(
                memory.get("max_over_gpus"), flags.get("memory_valid", True)
            ),
        )

    def job(self, profile: Profile) -> Job:
        """Return the job of the run; its profile gives the model's numbers."""
        return Job(
            name=self.identifier,
            model=profiled_model(profile, sequence=self.sequence),
            global_batch=self.global_batch,
            sequence=self.sequence,
            profile=self.model,
            precision=self.precision,  # type: ignore[arg-type]  # one of the known words, as read
            optimizer=self.optimizer,  # type: ignore[arg-type]  # one of the known words, as read
            max_tp=max(tp for _, replicas in self.stages for _, tp, _ in replicas),
            flash_attention=False,
            zero=1 if self.zero else 0,
            runtime=self.runtime,
        )

    def plan(self, catalogue: Catalogue) -> Plan:
        """Return the plan of the run: replica i of every stage forms pipeline i."""
        replicas = len(self.stages[0][1])
        each = self.micro_batch_size * replicas
        if self.global_batch % each:
            what = f"the global batch of {self.global_batch} is not a multiple of {each}"
            cure = "runs with uneven micro batches are not supported"
            raise InputError(Problem(self.identifier, what, cure))
        recompute: Recompute = "full" if self.recompute == "full" else "none"
        columns = [
            [Stage(layers, g[1], (self._place(g, catalogue),), recompute) for g in groups]
            for layers, groups in self.stages
        ]
        count = self.global_batch // each
        pipelines = tuple(Pipeline(count, stages) for stages in zip(*columns, strict=True))
        return Plan(self.micro_batch_size, pipelines)

    def _place(self, replica: tuple[str, int, str], catalogue: Catalogue) -> Place:
        gpu = catalogue.gpu_name(replica[0])
        return Place(gpu, f"{gpu}x{self.gpus_per_node}", replica[2])

    def cluster(self, catalogue: Catalogue) -> Cluster:
        """Return a cluster of the run's machine size with one machine per replica of a stage."""
        size = self.gpus_per_node
        places = Counter(
            self._place(replica, catalogue) for _, replicas in self.stages for replica in replicas
        )
        pools = (
            Pool(at.zone, at.gpu, at.machine, size, count * size) for at, count in places.items()
        )
        return Cluster(tuple(pools), catalogue)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is not a name")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{value!r} is not a positive whole number")
    return value


def _one_of(raw: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    """Return a keyword in lower case; if absent, the first of the known ones."""
    given = str(raw.get(key, known[0])).lower()
    if given not in known:
        raise ValueError(f"{key} is {given}, not one of {', '.join(known)}")
    return given


def _read_measured(value: object, valid: bool) -> float | None:
    if not valid or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"a measurement must be positive, not {value!r}")
    return float(value)
