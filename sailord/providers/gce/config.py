"""Reads the section ``[provider]`` with ``kind = "gce"``: what may be rented, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sailord.providers.interface import Pool
from simulator.documents.fields import InvalidValue, Table, quote
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue

ATTACHED = re.compile(r"(?P<host>n1-.+)-(?P<card>v100|t4)-(?P<count>[0-9]+)\Z")
"""The catalogue's names of machine types to which GPUs are attached."""
PROJECT = re.compile(r"[a-z][a-z0-9.:-]{4,61}[a-z0-9]\Z")
ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]\Z")
SECRET = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+\Z")
PACKAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,_-]+\])?==[0-9][A-Za-z0-9.+!_-]*\Z"
    r"|([A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,_-]+\])?@)?"
    r"[a-z]+://[^\s'\"\\$`#]+\.whl#sha256=[0-9a-f]{64}\Z"
)
"""A pinned requirement that is safe in a shell script: a version, or a wheel with its hash."""
IMAGE = (
    "projects/deeplearning-platform-release/global/images/family/"
    "common-cu129-ubuntu-2404-nvidia-580"
)
"""A Deep Learning VM image: Ubuntu 24.04, Python 3.12, NVIDIA's driver."""
GOOGLE_KEYS = "https://www.googleapis.com/oauth2/v3/certs"
"""The keys with which Google signs tokens of service accounts; they change every few days."""
FLEX = "flex-start"
"""The contract whose requests wait until Google has all of their instances."""
DEFAULT_ACCOUNT = "default"
"""The word for the project's own account, which may often do all in the project."""
QUOTA_METRICS: Mapping[str, str] = {
    "V100-16": "NVIDIA_V100_GPUS",
    "T4": "NVIDIA_T4_GPUS",
    "L4": "NVIDIA_L4_GPUS",
    "A100-40": "NVIDIA_A100_GPUS",
    "A100-80": "NVIDIA_A100_80GB_GPUS",
    "H100-80": "NVIDIA_H100_GPUS",
    "H200-141": "NVIDIA_H200_GPUS",
}


@dataclass(frozen=True, slots=True)
class GceConfig:
    """What may be rented, how an instance is made, and the timeouts."""

    project: str
    cluster_name: str
    pools: tuple[Pool, ...]
    image: str = IMAGE
    disk_gb: int = 200
    disk_type: str = "pd-balanced"
    network: str = "default"
    subnetwork: str | None = None
    external_ip: bool = True
    max_run_s: int = 7 * 86_400
    """Google deletes an instance after this time, whatever became of sailord."""
    alone_s: int = 4 * 3_600
    """An instance powers off after this time without a leader."""
    service_account: str = DEFAULT_ACCOUNT
    """Of the instances."""
    tags: tuple[str, ...] = ()
    placement: Mapping[str, str] = field(default_factory=dict)
    """Name of the compact placement policy, by region."""
    store: str = ""
    """Address of the store, as seen from the instances."""
    key_secret: str = ""
    """The cluster's key in the Secret Manager."""
    tls: str = "[tls]\ninsecure = true\n"
    """A section of the agents' configuration."""
    ca: str = ""
    """The certificate of the cluster's authority, PEM."""
    identity_keys: Path | str = GOOGLE_KEYS
    """A JSON Web Key Set that verifies what Google says of an instance: a file, or an address."""
    mounts: tuple[str, ...] | None = None
    """Prefixes of URIs where jobs may have data, for the agents' configuration; ``None``: those
    that agents assume. The previous version does not know the section."""
    package: str = ""
    """Pinned requirement that pip installs; empty: the image contains the agent."""
    groups: Mapping[Pool, str] = field(default_factory=dict)
    """Managed instance groups that make the instances of a pool, GKE's node pools included."""
    group_prices: Mapping[Pool, float] = field(default_factory=dict)
    """Dollars an hour of an instance that a group makes, where the user says so."""
    reservations: Mapping[Pool, str] = field(default_factory=dict)
    """Reservations in which the on-demand instances of a pool are made, and nowhere else."""
    billing: bool = False
    """Read prices from the Cloud Billing catalogue."""
    credentials: Path | None = None
    endpoint: str | None = None
    head_ip: str | None = None
    """Of sailord, as far as its address is an IPv4 address of a network."""
    iam_endpoint: str = "https://iam.googleapis.com"
    billing_endpoint: str = "https://cloudbilling.googleapis.com"
    quotas_endpoint: str = "https://cloudquotas.googleapis.com"
    call_s: float = 30.0
    """Timeout of a request."""
    operation_s: float = 180.0
    """Timeout of an operation; its outcome is in doubt after that."""
    poll_s: float = 1.0

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(sorted({pool.zone for pool in self.pools}))

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({region_of(zone) for zone in self.zones}))


def region_of(zone: str) -> str:
    """Return the region of a zone: us-central1 of us-central1-a."""
    return zone.rpartition("-")[0]


def machine_shape(machine: str) -> tuple[str, str, int]:
    """Return Google's machine type, and the kind and number of GPUs to attach."""
    found = ATTACHED.match(machine)
    if found is None:
        return machine, "", 0
    return found["host"], f"nvidia-tesla-{found['card']}", int(found["count"])


def read_gce(
    table: Table, *, folder: Path, cluster_name: str, catalogue: Catalogue
) -> GceConfig | None:
    """Read the keys of ``[provider]``; ``None`` after a mistake, which is reported."""
    before = len(table.problems.found)
    project = table.value("project", _PROJECT, required=True)
    zones = _words(table, "zones", required=True)
    for index, zone in enumerate(zones):
        if not ZONE.match(zone):
            cure = "give a zone of Google Cloud, such as us-central1-a"
            table.problems.add(table.place_of("zones", index), f"is {quote(zone)}", cure)
    machines = _machines(table, catalogue)
    kinds = _words(table, "contracts") or ("spot",)
    for index, kind in enumerate(kinds):
        if kind not in ("spot", "on-demand", FLEX):
            place, cure = (
                table.place_of("contracts", index),
                f'give "spot", "on-demand" or "{FLEX}"',
            )
            table.problems.add(place, f"is {quote(kind)}", cure)
    if FLEX in kinds and "on-demand" in kinds:
        # Plans tell instances apart by zone, machine type and whether they are Spot.
        cure = f'leave "on-demand" or "{FLEX}" out'
        table.report("contracts", "has two contracts without preemption", cure)
    offered = tuple(
        Pool(zone, machine, gpu, gpus, spot=kind == "spot", flex=kind == FLEX)
        for zone in zones
        for machine, gpu, gpus in machines
        for kind in kinds
    )
    store = table.value("store", _STORE, required=True)
    secret = table.value("key_secret", _SECRET, required=True)
    package = table.value("package", _PACKAGE)
    credentials = table.text("credentials")
    groups, group_prices = _groups(table, offered)
    # Only a group can queue.
    pools = tuple(pool for pool in offered if not pool.flex or pool in groups)
    if FLEX in kinds and not any(pool.flex for pool in pools):
        cure = "make a managed instance group and name it as [[provider.group]] (docs/gce.md)"
        table.report(
            "group", f'is missing with flex_start = true, and contracts has "{FLEX}"', cure
        )
    reservations = _reservations(table, pools, groups)
    config = GceConfig(
        project=project or "",
        cluster_name=cluster_name,
        pools=pools,
        image=table.text("image", default=IMAGE),
        disk_gb=table.integer("disk_gb", default=200, least=10, most=65536),
        disk_type=table.text("disk_type", default="pd-balanced"),
        network=table.text("network", default="default"),
        subnetwork=table.text("subnetwork"),
        external_ip=table.flag("external_ip", default=True),
        max_run_s=table.integer("max_run_s", default=7 * 86_400, least=3_600, most=120 * 86_400),
        alone_s=table.integer("alone_s", default=4 * 3_600, least=60, most=120 * 86_400),
        service_account=_account(table, is_needed=not groups.keys() >= set(pools)),
        tags=_words(table, "tags"),
        placement=_texts(table, "placement"),
        store=store or "",
        key_secret=secret or "",
        package=package or "",
        groups=groups,
        group_prices=group_prices,
        reservations=reservations,
        billing=table.flag("billing", default=False),
        credentials=None if credentials is None else folder / credentials,
        identity_keys=read_key_source(table, "identity_keys", folder),
        endpoint=table.text("endpoint"),
        call_s=table.number("call_s", default=30.0, above=0, most=600),
        operation_s=table.number("operation_s", default=180.0, above=0, most=3600),
        poll_s=table.number("poll_s", default=1.0, above=0, most=60),
    )
    return config if len(table.problems.found) == before else None


def read_key_source(table: Table, key: str, folder: Path) -> Path | str:
    """Read where a JSON Web Key Set is; left out, it is Google's."""
    text = table.text(key, default=GOOGLE_KEYS)
    if "://" not in text:
        return folder / text
    if not re.match(r"https://[^/\s]+|http://(127\.0\.0\.1|localhost)[:/]", text):
        cure = "give a file or an https:// address; left out, Google's is used"
        what = f"is {quote(text)}: an attacker who can change the answer could sign tokens"
        table.report(key, what, cure)
    return text


def _account(table: Table, *, is_needed: bool) -> str:
    """Read the instances' account, which a template gives to those of a group."""
    account = table.text("service_account")
    if is_needed and account is None and "service_account" not in table:
        cure = f'make one with the least rights (docs/gce.md); "{DEFAULT_ACCOUNT}": the project\'s'
        table.report("service_account", "is missing", cure)
    return account or DEFAULT_ACCOUNT


def _machines(table: Table, catalogue: Catalogue) -> list[tuple[str, str, int]]:
    found = []
    for index, name in enumerate(_words(table, "machines", required=True)):
        try:
            machine = catalogue.machine(name)
        except InputError as error:
            table.problems.take(error, place=table.place_of("machines", index))
        else:
            found.append((machine.name, machine.gpu, machine.gpus))
    return found


def _groups(table: Table, pools: tuple[Pool, ...]) -> tuple[dict[Pool, str], dict[Pool, float]]:
    """Read the groups of pools, and what their instances cost where that is said."""
    groups: dict[Pool, str] = {}
    prices: dict[Pool, float] = {}
    for entry in table.tables("group"):
        zone, machine = entry.text("zone", required=True), entry.text("machine", required=True)
        flex = entry.flag("flex_start", default=False)
        spot = entry.flag("spot", default=not flex)
        name = entry.text("name", required=True)
        price = entry.number("usd_per_hour", above=0.0, most=1e6)
        entry.finish()
        meant = Pool(zone or "", machine or "", "", 0, spot, flex)
        fitting = [pool for pool in pools if _is_meant(pool, meant)]
        if zone is not None and machine is not None and not fitting:
            what, cure = (
                f"{meant} is not a pool",
                "name a zone, a machine and a contract listed above",
            )
            entry.report("zone", what, cure)
        groups |= dict.fromkeys(fitting, name or "")
        if price is not None:
            prices |= dict.fromkeys(fitting, price)
    return groups, prices


def _is_meant(pool: Pool, meant: Pool) -> bool:
    return replace(pool, gpu="", gpus=0) == meant


def _reservations(
    table: Table, pools: tuple[Pool, ...], groups: Mapping[Pool, str]
) -> dict[Pool, str]:
    found: dict[Pool, str] = {}
    for entry in table.tables("reservation"):
        zone, machine = entry.text("zone", required=True), entry.text("machine", required=True)
        name = entry.value("name", _RESERVATION, required=True)
        entry.finish()
        meant = Pool(zone or "", machine or "", "", 0, spot=False)
        fitting = [pool for pool in pools if _is_meant(pool, meant)]
        if zone is not None and machine is not None and not fitting:
            cure = 'list its zone, its machine and the contract "on-demand" above'
            entry.report("zone", f"{machine} in {zone} (on demand) is not a pool", cure)
        if any(pool in groups for pool in fitting):
            cure = "name the reservation in the template of the group"
            entry.report("machine", "a managed instance group makes its instances", cure)
        found |= dict.fromkeys(fitting, name or "")
    return found


def _texts(table: Table, key: str) -> dict[str, str]:
    section = table.section(key)
    found = {name: section.text(name, default="") for name in section.values}
    section.finish()
    return found


def _words(table: Table, key: str, *, required: bool = False) -> tuple[str, ...]:
    def accept(value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise InvalidValue(f"is {quote(value)}", "give a list of texts")
        if not all(isinstance(one, str) and one for one in value):
            raise InvalidValue(f"is {quote(value)}", "give a list of texts")
        return tuple(dict.fromkeys(value))

    return table.value(key, accept, default=(), required=required)


def _accept_matching(pattern: re.Pattern[str], cure: str) -> Callable[[object], str]:
    def accept(value: object) -> str:
        if not isinstance(value, str) or not pattern.match(value):
            raise InvalidValue(f"is {quote(value)}", cure)
        return value

    return accept


_PROJECT = _accept_matching(PROJECT, "give the project's ID, as `gcloud projects list` does")
_STORE = _accept_matching(
    re.compile("etcd://"), "give etcd://HOST:PORT, since instances reach no other store"
)
_SECRET = _accept_matching(
    SECRET, "give projects/PROJECT/secrets/NAME/versions/NUMBER of the Secret Manager"
)
_RESERVATION = _accept_matching(
    re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?\Z"),
    "give the reservation's name, as `gcloud compute reservations list` shows it",
)
_PACKAGE = _accept_matching(PACKAGE, "pin a wheel: sailor[worker]@gs://BUCKET/NAME.whl#sha256=SUM")
