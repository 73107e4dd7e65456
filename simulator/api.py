"""The simulator's entry point: builds an estimator for a job, a cluster and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from simulator.cluster.cluster import Cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.files import list_folder, load_document
from simulator.documents.problems import InputError, Problem, nearest
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.paper_formula import paper_estimate
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import Catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.live_times import Correction
from simulator.layer_costs.profile import Profile, profile_name
from simulator.layer_costs.profile_file import read_profile
from simulator.network.network import MeasuredNetwork, Network
from simulator.network.network_file import network_from_json
from simulator.spec.job import Job
from simulator.spec.plan import Plan

ESTIMATORS = ("event", "paper")


class OtherModelError(InputError):
    """The profile that a job names was measured on another model."""


class Estimator(Protocol):
    """Estimates plans of one job on one cluster."""

    @property
    def name(self) -> str: ...

    def estimate(self, plan: Plan) -> Estimate: ...


@dataclass(frozen=True, slots=True)
class _PaperEstimator:
    """The closed formula (``paper_formula``) as an ``Estimator``."""

    job: Job
    profile: Profile
    network: Network
    facts: PlaceFacts
    name: str = "paper"

    def estimate(self, plan: Plan) -> Estimate:
        catalogue = self.facts.cluster.catalogue
        return paper_estimate(
            plan,
            job=self.job,
            profile=self.profile,
            network=self.network,
            usd_per_hour=self.facts.usd_per_hour,
            capacity_bytes=lambda place: float(catalogue.gpu(place.gpu).memory_bytes),
            gpus_per_node=self.facts.gpus_per_machine,
        ).estimate(plan)


@dataclass(frozen=True, slots=True)
class Measurements:
    """A folder of profiles (``profiles_<name>.json``), and its ``network.json`` if it has one."""

    folder: str = ""
    paths: Mapping[str, Path] = field(default_factory=dict)
    network: MeasuredNetwork = field(default_factory=MeasuredNetwork)
    live: tuple[Correction, ...] = ()
    """Corrections of the profile by the steps of the running job."""

    def profile(self, name: str, *, catalogue: Catalogue) -> Profile:
        """Read the profile of a name."""
        path = self.paths.get(name)
        if path is None:
            cure = (
                nearest(name, self.paths)
                if self.folder
                else "name the folder that holds it with --profiles"
            )
            raise InputError(Problem(f"profile {name}", f"there is no profiles_{name}.json", cure))
        document = load_document(path)
        return read_profile(document, catalogue=catalogue)

    def profile_of(self, job: Job, *, catalogue: Catalogue) -> Profile | None:
        """Read the profile that a job names; else the one that was measured of its model."""
        if job.profile is not None:
            named = self.profile(job.profile, catalogue=catalogue)
            if named.is_of_another(job.model.fingerprint):
                what = (
                    f"was measured on another model than {job.model.name} of the job, with other "
                    "settings that change its layers (dropout), or by another version of Sailor"
                )
                cure = "measure it again (sailorctl profile model), or leave [model] profile out"
                raise OtherModelError(Problem(f"profile {job.profile}", what, cure))
            return named
        name = profile_name(job.model.name)
        found = self.profile(name, catalogue=catalogue) if name in self.paths else None
        is_its = found is not None and found.fingerprint == job.model.fingerprint
        return found if is_its else None


def load_measurements(
    folder: Path | None, *, catalogue: Catalogue, links: Path | None = None
) -> Measurements:
    """Find the profiles of a folder and read its network.

    Links of the network file ``links`` take precedence over those of the folder.
    """
    found = Measurements() if folder is None else _of_folder(folder, catalogue)
    if links is None:
        return found
    measured = _read_network(links, catalogue).between
    network = replace(found.network, between={**found.network.between, **measured})
    return replace(found, network=network)


def _read_network(path: Path, catalogue: Catalogue) -> MeasuredNetwork:
    document = load_document(path)
    return network_from_json(document.data, place=document.name, catalogue=catalogue)


def _of_folder(folder: Path, catalogue: Catalogue) -> Measurements:
    paths = {
        path.stem.removeprefix("profiles_"): path
        for path in list_folder(folder)
        if path.name.startswith("profiles_") and path.suffix == ".json"
    }
    network = MeasuredNetwork()
    file = next((path for path in list_folder(folder) if path.name == "network.json"), None)
    if file is not None:
        network = _read_network(file, catalogue)
    if not paths and file is None:
        raise InputError(
            Problem(
                str(folder),
                "holds neither profiles_<name>.json nor network.json",
                "name another folder, or leave --profiles out",
            )
        )
    return Measurements(str(folder), paths, network)


def network_of(cluster: Cluster, measured: MeasuredNetwork) -> Network:
    """Return the network of a cluster, with its measurements."""
    return Network(
        catalogue=cluster.catalogue,
        measured=measured,
        zone_regions=dict(cluster.zone_regions),
        zone_caps={(link.from_zone, link.to_zone): link.bytes_per_s for link in cluster.zone_links},
        # A kind's largest machine, in which tensor parallelism has its collectives.
        machines={
            pool.gpu: pool.machine
            for pool in sorted(cluster.pools, key=lambda pool: pool.gpus_per_machine)
        },
    )


def estimator(name: str, *, job: Job, cluster: Cluster, measurements: Measurements) -> Estimator:
    """Return an estimator by name; it caches what plans of one job and cluster share."""
    network = network_of(cluster, measurements.network)
    facts = PlaceFacts(cluster, measurements.network)
    profile = measurements.profile_of(job, catalogue=cluster.catalogue)
    if name == "event":
        hints: tuple[str, ...] = ()
        if profile is None and measurements.paths:
            names = ", ".join(sorted(measurements.paths))
            hints = (f"the job names no profile; set [model] profile to one of {names}",)
        costs = LayerCosts(
            job,
            profile=profile,
            catalogue=cluster.catalogue,
            network=network,
            hints=hints,
            live=measurements.live,
        )
        return EventEstimator(costs, network, facts)
    if name == "paper":
        if profile is None:
            raise InputError(
                Problem(
                    "estimator paper",
                    "needs measured layers, and the job names no profile",
                    "set [model] profile, and give its folder with --profiles",
                )
            )
        return _PaperEstimator(job, profile, network, facts)
    raise InputError(Problem("estimator", f'"{name}" is not known', nearest(name, ESTIMATORS)))
