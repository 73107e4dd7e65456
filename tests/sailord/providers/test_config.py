"""Reading the section [provider], and its mistakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents.daemon.allowed_uris import MOUNTS
from sailord.config import load_config
from sailord.providers.config import EmulatedConfig, StaticConfig, kind_of, open_provider
from sailord.providers.emulated import EmulatedProvider
from sailord.providers.gce.config import GceConfig
from sailord.providers.interface import Pool
from sailord.providers.static import StaticProvider
from sailord.providers.trace import TraceProvider
from simulator.cluster.cluster import Cluster
from simulator.documents.fields import quote
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from tests.sailord.providers.gce.test_config import GOOD

HOST = '[[provider.host]]\nname = "gpu-1"\nzone = "us-central1-a"\nmachine = "a2-highgpu-4g"\n'
POOL = '[[provider.pool]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-4g"\nusd_per_hour = 2\n'
STATIC = f'[provider]\nkind = "static"\n{HOST}usd_per_hour = 3.5\n'
EMULATED = f'[provider]\nkind = "emulated"\nfolder = "m"\nagent = "agent.toml"\n{POOL}'
TRACE = EMULATED.replace('"emulated"', '"trace"\ntrace = "trace.toml"\nspeed = 60')
A100S = Pool("us-central1-a", "a2-highgpu-4g", "A100-40", 4, False)


def read(folder: Path, provider: str):
    (folder / "key").write_text("k" * 64)
    (folder / "key").chmod(0o600)
    (folder / "agent.toml").write_text("threads = 1\n")
    (folder / "trace.toml").write_text(
        'end_s = 100\n[[event]]\ntime_s = 10\nzone = "us-central1-a"\nmachines = 1\n'
    )
    (folder / "cluster.toml").write_text(
        '[[pool]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-4g"\nmachines = 2\n'
    )
    path = folder / "sailord.toml"
    path.write_text(
        'cluster_name = "test"\nstate = "head"\nkey = "key"\ncluster = "cluster.toml"\n' + provider
    )
    return load_config(path)


def test_a_host_needs_only_what_the_catalogue_lacks(tmp_path):
    config = read(tmp_path, STATIC)
    assert isinstance(config.provider, StaticConfig)
    (host,) = config.provider.hosts
    assert (host.name, host.pool, host.usd_per_hour) == ("gpu-1", A100S, 3.5)
    assert kind_of(config.provider) == "static"
    assert isinstance(open_provider(config.provider, config.cluster, lambda: 1.0), StaticProvider)


def test_google_is_observed_by_the_clock_that_requests_are_judged_by():
    cloud = GceConfig("my-project", "test", (), endpoint="http://fake")
    made = open_provider(cloud, Cluster((), load_catalogue()), lambda: 7.0)
    assert made._now() == 7.0
    asyncio.run(made.close())


def test_emulated_pools_and_traces_are_read(tmp_path):
    config = read(tmp_path, EMULATED)
    assert isinstance(config.provider, EmulatedConfig)
    assert [(kind.pool, kind.machines_max) for kind in config.provider.kinds] == [(A100S, 8)]
    assert kind_of(config.provider) == "emulated"
    made = open_provider(config.provider, config.cluster, lambda: 1.0)
    assert isinstance(made, EmulatedProvider)
    config = read(tmp_path, TRACE)
    assert kind_of(config.provider) == "trace"
    now = 1000.0
    made = open_provider(config.provider, config.cluster, lambda: now)
    assert isinstance(made, TraceProvider)
    assert made.stock(A100S) == 2
    now += 11 / 60
    assert made.stock(A100S) == 1


@pytest.mark.parametrize(
    ("allowed", "given"),
    [("", None), ('"gs://b/"', ("gs://b/",)), (", ".join(map(quote, MOUNTS.default)), None)],
)
def test_rented_instances_get_allowed_mounts_that_differ_from_the_default(tmp_path, allowed, given):
    gce = GOOD.replace('["us-central1-a", "us-east1-b"]', '["us-central1-a"]')
    text = f'[capacity]\nusd_max = 10.0\n[provider]\nkind = "gce"\n{gce}[tls]\ninsecure = true\n'
    config = read(tmp_path, text + (f"[mounts]\nallowed = [{allowed}]\n" if allowed else ""))
    assert isinstance(config.provider, GceConfig)
    assert config.provider.mounts == given


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (STATIC, HOST, "", "add [[provider.host]]"),
        (STATIC, 'name = "gpu-1"\n', "", "name: is missing"),
        (STATIC, "us-central1-a", "us-central1-x", "no zone"),
        (STATIC, "a2-highgpu-4g", "a2-hihgpu-4g", "did you mean"),
        (STATIC, HOST, f'{HOST}gpu = "V100-16"\n', "a2-highgpu-4g has A100-40"),
        (STATIC, HOST, f'{HOST}gpu = "A-hundred"\n', "A-hundred"),
        (STATIC, HOST, f"{HOST}gpus = 8\n", "a2-highgpu-4g has 4"),
        (STATIC, HOST, HOST + HOST, "a second time"),
        (STATIC, "usd_per_hour", "usd", "did you mean"),
        (STATIC, STATIC, STATIC + HOST.replace("gpu-1", "gpu-2"), "that of gpu-1, which is alike"),
        (EMULATED, POOL, "", "add [[provider.pool]]"),
        (EMULATED, POOL, POOL + POOL, "a second time"),
        (EMULATED, "usd_per_hour = 2\n", "", "usd_per_hour: is missing"),
        (EMULATED, '"agent.toml"', '"none.toml"', "cannot be read"),
        (TRACE, '"trace.toml"', '"none.toml"', "none.toml"),
        (TRACE, 'trace = "trace.toml"\n', "", "trace: is missing"),
        (TRACE, POOL, f"{POOL}spot = true\n", "a trace counts the pools of the cluster file"),
        (STATIC, '"static"', '"statics"', "statics"),
        (STATIC, STATIC, "[capacity]\non_demand_min = -1\n", "on_demand_min"),
        (STATIC, STATIC, "[capacity]\nnotice_s = 30\n", "notice_s"),
    ],
)
def test_a_mistake_in_the_provider_is_reported_with_its_cure(tmp_path, text, old, new, words):
    assert old in text
    with pytest.raises(InputError) as raised:
        read(tmp_path, text.replace(old, new, 1))
    assert words in str(raised.value)


@pytest.mark.parametrize("budget", ["", "usd_max = 9\n", "usd_per_hour_max = 1\n"])
def test_renting_needs_a_budget(tmp_path, budget):
    gce = (
        '[provider]\nkind = "gce"\nproject = "test-project"\nzones = ["us-central1-a"]\n'
        'machines = ["a2-highgpu-4g"]\nstore = "etcd://10.0.0.1:2379"\n'
        'key_secret = "projects/test-project/secrets/key/versions/1"\n'
        'service_account = "default"\n'
    )
    if budget:
        assert read(tmp_path, f"{gce}[capacity]\n{budget}").provider is not None
        return
    with pytest.raises(InputError, match="capacity: has no budget, and instances are rented"):
        read(tmp_path, gce)


def test_the_limits_of_capacity_are_read(tmp_path):
    policy = read(tmp_path, "[capacity]\non_demand_min = 2\nusd_max = 9\n").capacity
    assert (policy.on_demand_min, policy.usd_max, policy.usd_per_hour_max) == (2, 9.0, None)
