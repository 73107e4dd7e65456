"""Reads and checks sailord's configuration file, `sailord.toml`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from agents.daemon.allowed_uris import CHECKPOINTS, MOUNTS, read_allowed
from agents.daemon.credentials import check_mode, secret_path
from agents.protocol.names import NAME
from agents.rpc.signing import read_keys
from agents.rpc.tls_settings import TlsSettings, read_tls
from agents.store.locations import check_address
from sailord.capacity.core.model import CapacityPolicy
from sailord.core.model.options import Options
from sailord.network.core.model import NetworkPolicy
from sailord.notify.message_formats import FORMATS, KINDS, Format
from sailord.providers.config import ProviderConfig, read_provider
from sailord.providers.gce.config import GceConfig, read_key_source
from sailord.tokens import read_tokens
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.fields import InvalidValue, Table, open_table, quote
from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problems

SECRET_BYTES_MIN = 16
PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
T = TypeVar("T", Options, CapacityPolicy, NetworkPolicy)
KEYS = {
    "options": (
        *("share", "lease_s", "additions_gather_s", "start_s", "stall_s", "secure_s"),
        *("failures_until_held", "slow_times", "ended_jobs_kept"),
    ),
    "capacity": (
        *("usd_per_hour_max", "usd_max", "on_demand_min", "machines_per_pool_max"),
        *("parting_s", "boot_s", "surplus_s", "idle_s"),
    ),
    "network": ("seconds_per_hour", "mbytes_per_hour"),
}
"""What operators set. An inner table ``testing`` sets every field, for tests and clusters on one
machine (ADR 121)."""
LogFormat = Literal["json", "terminal"]


@dataclass(frozen=True, slots=True)
class WebhookReceiver:
    """A receiver of outgoing webhooks."""

    url: str
    secret: bytes = b""
    """Signs each message of our own form; of PagerDuty's it is the routing key."""
    format: Format = "sailor"
    events: tuple[str, ...] = ()
    """The kinds of events that it gets; empty: its format's default."""


@dataclass(frozen=True, slots=True)
class Webhooks:
    """Credentials of incoming webhooks, and receivers of outgoing ones."""

    secret: bytes | None = None
    """Of the signed-JSON form; ``None``: not accepted."""
    alertmanager_token: str | None = None
    pubsub_audience: str | None = None
    pubsub_email: str | None = None
    """The service account of the Pub/Sub subscription."""
    pubsub_keys: Path | str | None = None
    """A JSON Web Key Set that verifies its tokens: a file, or an address."""
    receivers: tuple[WebhookReceiver, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    cluster_name: str
    state: Path
    store: str
    socket: Path
    store_socket: Path
    host: str
    port: int
    address: str
    """Where agents and clients reach this sailord, as ``host:port``."""
    key: Path
    """The cluster's secret key, shared with agents."""
    packages: str
    """Where packed work folders are kept: a folder, or a URI that fsspec supports."""
    token: bytes | None
    """Bearer token of TCP clients; ``None``: they are refused."""
    cluster_file: Path
    cluster: Cluster
    profiles: Path | None
    log_format: LogFormat
    options: Options
    webhooks: Webhooks
    capacity: CapacityPolicy = field(default_factory=CapacityPolicy)
    provider: ProviderConfig | None = None
    """Where machines are rented; ``None``: nowhere, nodes are started by hand."""
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    tokens: Path | None = None
    """A file of named tokens."""
    operators: str | None = None
    viewers: str | None = None
    """Groups of this host whose members have that role on the Unix socket."""
    checkpoints: tuple[str, ...] = CHECKPOINTS.default
    mounts: tuple[str, ...] = MOUNTS.default
    """Prefixes of URIs where jobs may have checkpoints, and data."""
    tls: TlsSettings | None = None
    """``None``: plain HTTP."""
    otlp: str | None = None
    """Address of the OpenTelemetry collector that gets a trace of each reconfiguration."""
    unread: tuple[str, ...] = ()
    """Where the file has keys that are no longer read."""

    @property
    def network_file(self) -> Path:
        """The file of measured links; it exists once one was measured."""
        return self.state / "network.json"

    @property
    def measured_links(self) -> tuple[Path, int] | None:
        """The file of measured links and when it changed; ``None``: there is none."""
        try:
            return self.network_file, self.network_file.stat().st_mtime_ns
        except OSError:
            return None


def load_config(path: Path, *, reads_secrets: bool = True) -> Config:
    """Read the file and the files that it names; all problems are reported at once.

    Without ``reads_secrets`` those need not be readable: systemd may have them for the unit alone.
    """
    document = load_document(path, flaws_raise=False)
    problems = Problems()
    top = open_table(document, problems)
    name = top.value("cluster_name", _name, required=True)
    state = _path(top, "state", path.parent, required=True)
    store = top.text("store")
    listen = top.section("listen")
    host = listen.text("host", default="127.0.0.1")
    port = listen.integer("port", default=7077, least=0, most=65535)
    address = listen.text("address", default=f"{host}:{port}")
    socket = _path(listen, "socket", path.parent)
    token = _secret(listen, "token_file", path.parent, is_read=reads_secrets)
    tokens = _path(listen, "tokens", path.parent)
    operators, viewers = listen.text("operators"), listen.text("viewers")
    if tokens is not None and tokens.exists():
        try:
            read_tokens(tokens)
        except InputError as error:
            problems.take(error)
    listen.finish()
    tls = read_tls(
        top, path.parent, state, may_sign=True, store=store,
        named={"listen.host": host, "listen.address": address},
    )  # fmt: skip
    named_key = top.text("key", required=True)
    key = None if named_key is None else secret_path(named_key, path.parent)
    cluster_file = _path(top, "cluster", path.parent, required=True)
    profiles = _path(top, "profiles", path.parent)
    packages = top.text("packages")
    log_format = top.choice("log", ("json", "terminal"), default="json")
    unread: list[str] = []
    options = _limits(top, "options", Options(), unread)
    webhooks = _webhooks(top, path.parent, reads_secrets=reads_secrets)
    capacity = _limits(top, "capacity", CapacityPolicy(), unread, least=0)
    telemetry = top.section("telemetry")
    otlp = telemetry.value("otlp", _url, required="telemetry" in top)
    telemetry.finish()
    network = _limits(top, "network", NetworkPolicy(), unread, least=0)
    checkpoints = read_allowed(top.section("checkpoints"), CHECKPOINTS)
    mounts = read_allowed(top.section("mounts"), MOUNTS)
    cluster = None
    if cluster_file is not None:
        try:
            cluster = load_cluster(cluster_file)
        except InputError as error:
            problems.take(error)
    provider = read_provider(top, folder=path.parent, cluster_name=name or "", cluster=cluster)
    options = replace(options, reserve_s=0.0 if provider is None else capacity.reserve_s)
    _check_renting(provider, options, capacity, top)
    if isinstance(provider, GceConfig):
        own = None if mounts == MOUNTS.default else mounts
        provider = replace(provider, head_ip=_network_ip(address), mounts=own)
        provider = _with_tls(provider, tls, address, top)
    top.finish()
    if store is not None:
        later = None if tls is None else tls.made_in
        check_address(store, problems, top.place_of("store"), made_later=later)
    if key is not None and reads_secrets:
        try:
            read_keys(key)
        except InputError as error:
            problems.take(error, place=f"{top.place_of('key')}:")
    problems.raise_if_any()
    assert name is not None
    assert state is not None
    assert key is not None
    assert cluster_file is not None
    assert cluster is not None
    return Config(
        cluster_name=name,
        state=state,
        store=store or f"embedded://{state.resolve()}/store.db",
        socket=socket or state / "sailord.sock",
        store_socket=state / "store.sock",
        host=host,
        port=port,
        address=address,
        key=key,
        packages=_packages(packages or "packages", state if packages is None else path.parent),
        token=token,
        cluster_file=cluster_file,
        cluster=cluster,
        profiles=profiles,
        log_format="json" if log_format == "json" else "terminal",
        options=options,
        webhooks=webhooks,
        capacity=capacity,
        provider=provider,
        network=network,
        tokens=tokens,
        operators=operators,
        viewers=viewers,
        checkpoints=checkpoints,
        mounts=mounts,
        tls=tls,
        otlp=otlp,
        unread=tuple(unread),
    )


def _check_renting(
    provider: ProviderConfig | None, options: Options, capacity: CapacityPolicy, top: Table
) -> None:
    """Report what other sections lack, or must not have, where sailord rents."""
    if options.share and provider is not None:
        cure = "leave one of them out: nodes of a provider are not shared yet"
        top.problems.add(top.place_of("options"), "share is set, and there is a [provider]", cure)
    is_unbounded = capacity.usd_max is None and capacity.usd_per_hour_max is None
    if isinstance(provider, GceConfig) and is_unbounded:
        cure = "set usd_max (dollars in all), usd_per_hour_max, or both, in [capacity]"
        top.problems.add(top.place_of("capacity"), "has no budget, and instances are rented", cure)


def _with_tls(provider: GceConfig, tls: TlsSettings | None, address: str, top: Table) -> GceConfig:
    """Tell the rented machines how they speak TLS: they enrol at this sailord."""
    if tls is None:
        return provider
    place = top.place_of("provider")
    if tls.authority is None:
        cure = "set authority under [tls] (docs/security.md)"
        top.problems.add(place, "rents machines, but nothing signs their certificates", cure)
        return provider
    if "ca=" not in provider.store:
        cure = "append ?ca=FILE&cert=FILE&key=FILE as they lie on those machines (docs/gce.md)"
        top.problems.add(place, f"the machines' store {provider.store} has no TLS", cure)
    try:
        ca = tls.files.ca.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        ca = ""  # The authority itself is checked when sailord starts.
    section = f'[tls]\nca = "ca.pem"\nenrol = "{address}"\n'
    return replace(provider, tls=section, ca=ca.strip())


def _network_ip(address: str) -> str | None:
    """Return an address without its port if it is an IPv4 address of a network."""
    try:
        found = IPv4Address(address.rpartition(":")[0])
    except ValueError:
        return None
    return None if found.is_loopback or found.is_unspecified else str(found)


def _name(value: object) -> str:
    if not isinstance(value, str) or not NAME.match(value):
        raise InvalidValue(f"is {quote(value)}", "give lower-case letters, digits and hyphens")
    return value


def _path(table: Table, key: str, folder: Path, *, required: bool = False) -> Path | None:
    text = table.text(key, required=required)
    return None if text is None else folder / text


def _packages(text: str, folder: Path) -> str:
    return text if "://" in text else f"file://{(folder / text).resolve()}"


def _secret(table: Table, key: str, folder: Path, *, is_read: bool) -> bytes | None:
    name = table.text(key)
    if name is None or not is_read:
        return None
    path = secret_path(name, folder)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        cure = "name a file that contains a secret"
        table.report(key, f"{path} cannot be read: {error.strerror}", cure)
        return None
    try:
        check_mode(path)
    except InputError as error:
        table.problems.take(error, place=f"{table.place_of(key)}:")
        return None
    if len(secret) < SECRET_BYTES_MIN or not secret.isascii():
        what = f"{path} does not contain {SECRET_BYTES_MIN} or more ASCII characters"
        table.report(key, what, "create one with: openssl rand -hex 32")
        return None
    return secret


def _limits(
    top: Table, section: str, limits: T, unread: list[str], *, least: float | None = None
) -> T:
    """Read numbers that replace the fields of ``limits``; above 0 unless ``least`` is given."""
    read: dict[str, Any] = {}
    above = 0.0 if least is None else None
    own, keys = top.section(section), KEYS[section]
    testing = own.section("testing")
    for each in fields(limits):
        is_given = each.name in keys and each.name in own
        table = own if is_given and each.name not in testing else testing
        default = getattr(limits, each.name)
        if isinstance(default, bool):
            read[each.name] = table.flag(each.name, default=default)
        elif isinstance(default, int):
            read[each.name] = table.integer(each.name, default=default, least=min(default, 1))
        elif default is None:
            read[each.name] = table.number(each.name, above=0, most=1e9)
        else:
            read[each.name] = table.number(
                each.name, default=default, above=above, least=least, most=1e6
            )
    testing.finish()
    unread += own.no_longer_read(sorted({*type(limits).__annotations__}.difference(keys)))
    own.finish()
    return replace(limits, **read)


def _webhooks(top: Table, folder: Path, *, reads_secrets: bool) -> Webhooks:
    table = top.section("webhooks")
    secret = _secret(table, "secret_file", folder, is_read=reads_secrets)
    alertmanager = _secret(table, "alertmanager_token_file", folder, is_read=reads_secrets)
    pubsub = table.section("pubsub")
    audience = pubsub.text("audience", required="pubsub" in table)
    email = pubsub.text("email", required="pubsub" in table)
    keys = read_key_source(pubsub, "keys", folder) if "pubsub" in table else None
    pubsub.finish()
    receivers = []
    for entry in table.tables("receiver"):
        receiver = _receiver(entry, folder, reads_secrets=reads_secrets)
        if receiver is not None:
            receivers.append(receiver)
    table.finish()
    token = None if alertmanager is None else alertmanager.decode()
    return Webhooks(secret, token, audience, email, keys, tuple(receivers))


def _receiver(entry: Table, folder: Path, *, reads_secrets: bool) -> WebhookReceiver | None:
    """Read a receiver: its address may be a secret itself, as Slack's is."""
    form = entry.choice("format", FORMATS, default="sailor")
    secret = _secret(entry, "secret_file", folder, is_read=reads_secrets)
    hidden = _secret(entry, "url_file", folder, is_read=reads_secrets)
    url = entry.value("url", _url)
    if url is None and "url" not in entry and "url_file" not in entry:
        if form == "pagerduty":
            url = PAGERDUTY
        else:
            entry.report("url", "is missing", "give it, or url_file if it is a secret")
    if "url" in entry and "url_file" in entry:
        entry.report("url_file", "is given beside url", "keep one of the two")
    elif hidden is not None:
        try:
            url = _url(hidden.decode().strip())
        except (InvalidValue, UnicodeDecodeError):
            entry.report("url_file", "holds no address", "write https://HOST/PATH into the file")
    if form != "slack" and "secret_file" not in entry:
        what = "signing secret" if form == "sailor" else "routing key"
        entry.report("secret_file", "is missing", f"name a file that contains the {what}")
    events = entry.value("events", _event_kinds, default=())
    entry.finish()
    if url is None or (secret is None and form != "slack"):
        return None
    kind = next(each for each in FORMATS if each == form)
    return WebhookReceiver(url, secret or b"", kind, events or ())


def _event_kinds(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(KINDS):
        raise InvalidValue(f"is {quote(value)}", f"give a list of {', '.join(KINDS)}")
    return tuple(map(str, value))


def _url(value: object) -> str:
    if not isinstance(value, str) or not re.match(r"https?://[^/\s]+", value):
        raise InvalidValue(f"is {quote(value)}", "give an https:// or http:// URL")
    try:
        parts = urlsplit(value)
        _ = parts.port
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        what = "has a host name with an empty part, or one of more than 63 characters"
        raise InvalidValue(what, "give an https:// or http:// URL") from None
    except ValueError as error:
        raise InvalidValue(f"is no address ({error})", "give an https:// or http:// URL") from None
    return value
