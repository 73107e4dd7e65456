"""GPUs, links, machine types, prices and regions, in bytes, seconds and dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

GpuPrecision = Literal["fp32", "tf32", "bf16", "fp16"]
TrainingPrecision = Literal["fp32", "bf16", "fp16"]
Distance = Literal["zone", "region", "continent", "world"]

GPU_PRECISIONS: tuple[GpuPrecision, ...] = ("fp32", "tf32", "bf16", "fp16")
DISTANCES: tuple[Distance, ...] = ("zone", "region", "continent", "world")

GIB = 2**30
ANYWHERE = "*"  # The region of a price that holds in every region.


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU kind with its vendor's peak figures.

    ``memory_bytes`` is the nominal size, ``usable_memory_bytes`` what the driver hands out.
    ``peak_flops`` has the precisions that the hardware supports: dense rates with accumulation
    in fp32, as training uses.
    """

    name: str
    memory_bytes: int
    usable_memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    source: str
    date: str
    multiprocessors: int | None = None
    host_bytes_per_s: float | None = None
    """Rate of copies to or from its host's memory while all GPUs of its usual machine copy."""

    def computes_in(self, precision: TrainingPrecision) -> TrainingPrecision:
        """Return the format in which it computes a job: without bf16 in hardware, in fp32."""
        return "fp32" if precision == "bf16" and "bf16" not in self.peak_flops else precision


@dataclass(frozen=True, slots=True)
class Link:
    """A link: latency, bandwidth of one flow and bandwidth of all flows together.

    Bandwidths are per direction. ``full_duplex`` tells whether both directions have full
    bandwidth at once (NVLink, networks) or share it (copies through a host).
    """

    latency_s: float
    flow_bytes_per_s: float
    aggregate_bytes_per_s: float
    source: str
    date: str
    full_duplex: bool = True
    ring_bytes_per_s: float = 0.0
    """Rate at which each GPU sends in a ring all-reduce inside a machine; 0: that of one flow."""
    step_s: float = 0.0
    """Latency of a step of such a ring, after its launch."""

    def seconds(self, bytes_each: float, flows: int = 1) -> float:
        """Return the seconds that ``flows`` concurrent transfers of ``bytes_each`` take."""
        assert bytes_each >= 0, bytes_each
        assert flows >= 1, flows
        alone_s = bytes_each / self.flow_bytes_per_s
        together_s = flows * bytes_each / self.aggregate_bytes_per_s
        return self.latency_s + max(alone_s, together_s)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one machine in one region; an unknown spot price is ``None``."""

    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None
    source: str
    date: str

    def usd_per_hour(self, *, spot: bool) -> float | None:
        """Return the spot or on-demand price, or ``None`` if it is unknown."""
        return self.spot_usd_per_hour if spot else self.on_demand_usd_per_hour

    def scaled(self, factor: float) -> Price:
        """Return the price of ``factor`` machines."""
        spot = self.spot_usd_per_hour
        return replace(
            self,
            on_demand_usd_per_hour=self.on_demand_usd_per_hour * factor,
            spot_usd_per_hour=None if spot is None else spot * factor,
        )

    def plus(self, other: Price) -> Price:
        """Return the sum of two prices; its spot price is known if both are."""
        one, two = self.spot_usd_per_hour, other.spot_usd_per_hour
        return Price(
            on_demand_usd_per_hour=self.on_demand_usd_per_hour + other.on_demand_usd_per_hour,
            spot_usd_per_hour=None if one is None or two is None else one + two,
            source=" | ".join(dict.fromkeys((self.source, other.source))),
            date=min(self.date, other.date),
        )


@dataclass(frozen=True, slots=True)
class MachineType:
    """A machine type: its GPUs, the link between them, its NIC and its prices by region.

    ``nic`` is the link to another such machine in the same zone; its aggregate bandwidth is the
    published rate ``nic_bytes_per_s`` less protocol overhead.
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
        """Return the price in a region, or ``None`` if it is unknown."""
        return self.prices.get(region, self.prices.get(ANYWHERE))

    def with_gpus(self, gpus: int, *, name: str | None = None) -> MachineType:
        """Return the machine scaled to another number of GPUs: NIC, vCPUs, memory and prices.

        The link between the GPUs stays the same.
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
    """A provider's region; its continent decides egress prices and latency."""

    name: str
    continent: str
    provider: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class DistanceLimits:
    """Latency and bandwidth caps that a distance adds to the machines' own links.

    A cap of ``None`` means no cap.
    """

    distance: Distance
    latency_s: float
    flow_bytes_per_s: float | None
    aggregate_bytes_per_s: float | None
    source: str
    date: str

    def link(self, here: Link, there: Link) -> Link:
        """Return the link between two machines at this distance, from the NICs of both."""
        limits = (here, there, self)
        flows = (one.flow_bytes_per_s for one in limits)
        aggregates = (one.aggregate_bytes_per_s for one in limits)
        return Link(
            latency_s=max(here.latency_s, there.latency_s) + self.latency_s,
            flow_bytes_per_s=min(rate for rate in flows if rate is not None),
            aggregate_bytes_per_s=min(rate for rate in aggregates if rate is not None),
            source=" | ".join(dict.fromkeys(one.source for one in limits)),
            date=min(one.date for one in limits),
        )


@dataclass(frozen=True, slots=True)
class Egress:
    """The price of a byte sent from one place to another; the sender pays."""

    usd_per_byte: float
    source: str
    date: str
