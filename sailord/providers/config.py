"""Reads the section ``[provider]`` of sailord's file, and opens the provider that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sailord.providers.emulated import EmulatedPool, EmulatedProvider
from sailord.providers.gce.config import GceConfig, read_gce
from sailord.providers.interface import Pool, Provider
from sailord.providers.static import Host, StaticProvider
from sailord.providers.trace import TraceProvider
from simulator.cluster.cluster import Cluster
from simulator.documents.fields import Table
from simulator.documents.problems import InputError
from simulator.traces.trace import Trace
from simulator.traces.trace_file import load_trace

KINDS = ("gce", "static", "emulated", "trace")


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """Configuration of the provider ``static``."""

    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class EmulatedConfig:
    """Configuration of the providers ``emulated`` and ``trace``."""

    folder: Path
    agent: str
    kinds: tuple[EmulatedPool, ...]
    trace: Trace | None = None
    columns: tuple[Pool, ...] = ()
    speed: float = 1.0


ProviderConfig = GceConfig | StaticConfig | EmulatedConfig


def read_provider(
    top: Table, *, folder: Path, cluster_name: str, cluster: Cluster | None
) -> ProviderConfig | None:
    """Read ``[provider]``; ``None`` if it is absent or has mistakes, which are reported."""
    if "provider" not in top:
        return None
    table = top.section("provider")
    kind = table.choice("kind", KINDS, required=True)
    choice: ProviderConfig | None = None
    if cluster is None:
        return None  # The cluster file has mistakes of its own, reported elsewhere.
    match kind:
        case "gce":
            choice = read_gce(
                table, folder=folder, cluster_name=cluster_name, catalogue=cluster.catalogue
            )
        case "static":
            choice = _read_static(table, cluster)
        case "emulated" | "trace":
            choice = _read_emulated(table, folder, cluster, is_replayed=kind == "trace")
        case _:
            return None
    table.finish()
    return choice


def kind_of(choice: ProviderConfig) -> str:
    """Return the provider's kind, as the file names it."""
    match choice:
        case StaticConfig():
            return "static"
        case EmulatedConfig():
            return "emulated" if choice.trace is None else "trace"
        case GceConfig():
            return "gce"


def open_provider(choice: ProviderConfig, cluster: Cluster, now: Callable[[], float]) -> Provider:
    """Open the provider; its libraries are imported only here."""
    match choice:
        case StaticConfig():
            return StaticProvider(choice.hosts, now, now())
        case EmulatedConfig():
            emulated = EmulatedProvider(choice.folder, choice.agent, choice.kinds, now)
            if choice.trace is None:
                return emulated
            return TraceProvider(emulated, choice.trace, choice.columns, now, now(), choice.speed)
        case GceConfig():
            from sailord.providers.gce.provider import open_gce  # noqa: PLC0415 - an optional package

            return open_gce(choice, cluster.catalogue, now)


def _pool(table: Table, cluster: Cluster) -> Pool:
    """Read a pool; GPU kind and count default to those of the machine type."""
    catalogue, regions = cluster.catalogue, dict(cluster.zone_regions)
    zone = _read_name(
        table, "zone", lambda name: name if catalogue.zone_region(name, regions) else ""
    )
    machine = _read_name(table, "machine", lambda name: catalogue.machine(name).name)
    gpu, gpus = "", 1
    if machine:
        gpu, gpus = catalogue.machine(machine).gpu, catalogue.machine(machine).gpus
    if "gpu" in table:
        said = _read_name(table, "gpu", catalogue.gpu_name)
        if said and gpu and said != gpu:
            table.report("gpu", f"is {said}, and {machine} has {gpu}", "leave it out")
    if "gpus" in table:
        said_gpus, most = table.integer("gpus", default=gpus), gpus
        if machine and said_gpus > most:
            table.report("gpus", f"is {said_gpus}, and {machine} has {most}", "leave it out")
        gpus = said_gpus
    return Pool(zone, machine, gpu, gpus, table.flag("spot", default=False))


def _read_name(table: Table, key: str, named: Callable[[str], str]) -> str:
    """Read a name, and return it as the catalogue spells it; empty after a mistake."""
    text = table.text(key, required=True)
    if text is None:
        return ""
    try:
        return named(text)
    except InputError as error:
        table.problems.take(error, place=table.place_of(key))
        return ""


def _read_static(table: Table, cluster: Cluster) -> StaticConfig:
    hosts: list[Host] = []
    for entry in table.tables("host"):
        name = entry.text("name", required=True)
        if any(host.name == name for host in hosts):
            entry.report("name", f'is "{name}" a second time', "list each host once")
        price = entry.number("usd_per_hour", least=0.0, most=1e6)
        host = Host(name or "", _pool(entry, cluster), price)
        alike = next((each for each in hosts if each.pool == host.pool), host)
        if alike.usd_per_hour != price:
            what = f"is not that of {alike.name}, which is alike"
            cure = "give hosts of one zone, machine type and contract one price, or none"
            entry.report("usd_per_hour", what, cure)
        hosts.append(host)
        entry.finish()
    if not hosts and "host" not in table:
        table.report("host", "is missing", "add [[provider.host]] with name, zone and machine")
    return StaticConfig(tuple(hosts))


def _read_emulated(
    table: Table, folder: Path, cluster: Cluster, *, is_replayed: bool
) -> EmulatedConfig | None:
    kinds: list[EmulatedPool] = []
    columns = tuple(
        Pool(p.zone, p.machine, p.gpu, p.gpus_per_machine, p.spot) for p in cluster.pools
    )
    for entry in table.tables("pool"):
        price = entry.number("usd_per_hour", required=True, least=0.0, most=1e6)
        pool = _pool(entry, cluster)
        if any(kind.pool == pool for kind in kinds):
            entry.report("machine", f"is {pool} a second time", "list each pool once")
        if is_replayed and pool.machine and pool not in columns:
            cure = "add it there as a [[pool]]: a trace counts the pools of the cluster file"
            entry.report("machine", f"is {pool}, which is not in the cluster file", cure)
        kinds.append(EmulatedPool(pool, price or 0.0, entry.integer("machines_max", default=8)))
        entry.finish()
    if not kinds:
        table.report(
            "pool", "is missing", "add [[provider.pool]] with zone, machine and usd_per_hour"
        )
    place = table.text("folder", required=True)
    base = table.text("agent", required=True)
    text = _text(table, "agent", None if base is None else folder / base)
    trace_file = table.text("trace", required=is_replayed) if is_replayed else None
    speed = table.number("speed", default=1.0, above=0.0, most=1e4) if is_replayed else 1.0
    trace = None
    if trace_file is not None:
        try:
            trace = load_trace(folder / trace_file, cluster)
        except InputError as error:
            table.problems.take(error, place=table.place_of("trace"))
            return None
    if place is None or text is None:
        return None
    return EmulatedConfig(folder / place, text, tuple(kinds), trace, columns, speed)


def _text(table: Table, key: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        cure = "name the configuration file that the agents share"
        table.report(key, f"{path} cannot be read: {why}", cure)
        return None
