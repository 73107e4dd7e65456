"""What a GPU, a link, a machine type and its price are; figures in bytes, seconds and dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Distance = Literal["zone", "region", "continent", "world"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
DISTANCES: tuple[Distance, ...] = ("zone", "region", "continent", "world")

ANYWHERE = "*"  # in place of a region: a price that holds in every one


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, with the best that its maker says it can do.

    ``memory_bytes`` is the size in its name, ``usable_memory_bytes`` what the driver hands out.
    ``peak_flops`` holds only the precisions that the hardware has: dense rates, and those of
    accumulation in fp32, which is what training uses.
    """

    name: str
    memory_bytes: int
    usable_memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes: a start-up time, a cap on one flow and a cap on all flows together.

    Bandwidths are one way. ``full_duplex`` says whether the other way has as much of its own
    at the same time, as NVLink and networks have, or shares it, as copies through a host do.
    """

    latency_s: float
    flow_bytes_per_s: float
    aggregate_bytes_per_s: float
    source: str
    date: str
    full_duplex: bool = True

    def seconds(self, bytes_each: float, flows: int = 1) -> float:
        """Say how long ``flows`` transfers of ``bytes_each``, begun together, take to end."""
        assert bytes_each >= 0, bytes_each
        assert flows >= 1, flows
        alone_s = bytes_each / self.flow_bytes_per_s
        together_s = flows * bytes_each / self.aggregate_bytes_per_s
        return self.latency_s + max(alone_s, together_s)


@dataclass(frozen=True, slots=True)
class Price:
    """What one machine costs in one region; ``None`` for spot where it is not known."""

    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None
    source: str
    date: str

    def usd_per_hour(self, *, spot: bool) -> float | None:
        """Give the price of the kind asked for, or ``None`` where it is not known."""
        return self.spot_usd_per_hour if spot else self.on_demand_usd_per_hour

    def scaled(self, factor: float) -> Price:
        """Give the price of that part, or that multiple, of the machine."""
        spot = self.spot_usd_per_hour
        return replace(
            self,
            on_demand_usd_per_hour=self.on_demand_usd_per_hour * factor,
            spot_usd_per_hour=None if spot is None else spot * factor,
        )

    def plus(self, other: Price) -> Price:
        """Give the price of both together; spot is known where it is known of both."""
        one, two = self.spot_usd_per_hour, other.spot_usd_per_hour
        return Price(
            on_demand_usd_per_hour=self.on_demand_usd_per_hour + other.on_demand_usd_per_hour,
            spot_usd_per_hour=None if one is None or two is None else one + two,
            source=" | ".join(dict.fromkeys((self.source, other.source))),
            date=min(self.date, other.date),
        )


@dataclass(frozen=True, slots=True)
class MachineType:
    """One kind of machine: its GPUs, the link between them, its way out, and its prices.

    ``nic`` is the way to another such machine in the same zone; its aggregate is what the
    published rate ``nic_bytes_per_s`` leaves after protocol overhead. ``prices`` is by region.
    """

    name: str
    gpu: str
    gpus: int
    intra_link: Link
    nic: Link
    nic_bytes_per_s: float
    vcpus: int | None
    host_memory_bytes: int | None
    prices: Mapping[str, Price] = field(hash=False)
    source: str
    date: str

    def price(self, region: str) -> Price | None:
        """Give the price in a region, or ``None`` where it is not known."""
        return self.prices.get(region, self.prices.get(ANYWHERE))

    def with_gpus(self, gpus: int, *, name: str | None = None) -> MachineType:
        """Give the same machine with another number of GPUs and its share of all else.

        The link between the GPUs stays as it is: a bus is not slower for having fewer on it.
        """
        assert gpus >= 1, gpus
        if gpus == self.gpus and name is None:
            return self
        share = gpus / self.gpus
        nic = replace(self.nic, aggregate_bytes_per_s=self.nic.aggregate_bytes_per_s * share)
        return replace(
            self,
            name=f"{self.name}/{gpus}" if name is None else name,
            gpus=gpus,
            nic=nic,
            nic_bytes_per_s=self.nic_bytes_per_s * share,
            vcpus=None if self.vcpus is None else max(1, round(self.vcpus * share)),
            host_memory_bytes=(
                None if self.host_memory_bytes is None else round(self.host_memory_bytes * share)
            ),
            prices={region: price.scaled(share) for region, price in self.prices.items()},
        )


@dataclass(frozen=True, slots=True)
class Region:
    """A provider's region and the continent by which traffic is priced and slowed."""

    name: str
    continent: str
    provider: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class DistanceLimits:
    """What a distance adds to the two machines' own links: delay, and caps (``None``: none)."""

    distance: Distance
    latency_s: float
    flow_bytes_per_s: float | None
    aggregate_bytes_per_s: float | None
    source: str
    date: str

    def link(self, here: Link, there: Link) -> Link:
        """Give the link between two machines that stand this far apart."""
        flows = [here.flow_bytes_per_s, there.flow_bytes_per_s]
        aggregates = [here.aggregate_bytes_per_s, there.aggregate_bytes_per_s]
        if self.flow_bytes_per_s is not None:
            flows.append(self.flow_bytes_per_s)
        if self.aggregate_bytes_per_s is not None:
            aggregates.append(self.aggregate_bytes_per_s)
        said_by = dict.fromkeys((here.source, there.source, self.source))
        return Link(
            latency_s=max(here.latency_s, there.latency_s) + self.latency_s,
            flow_bytes_per_s=min(flows),
            aggregate_bytes_per_s=min(aggregates),
            source=" | ".join(said_by),
            date=min(here.date, there.date, self.date),
        )


@dataclass(frozen=True, slots=True)
class Egress:
    """What a byte costs that leaves one place for another; the sender pays."""

    usd_per_byte: float
    source: str
    date: str
