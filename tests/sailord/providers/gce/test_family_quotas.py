"""Quotas of GPUs that no region lists, from the Cloud Quotas API."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from sailord.capacity.core.model import CapacityState
from sailord.capacity.core.planner_view import possible_supplies
from sailord.capacity.core.supply import obtainable
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.family_quotas import KEPT_S, RETRY_S, FamilyQuotas, read_families
from sailord.providers.gce.quotas import family_of, quotas_of
from sailord.providers.interface import Instance, Pool, QuotaUsage
from sailord.text.capacity_text import capacity_text
from tests.gce.cloud import HERE, config, pool

H100 = Pool(HERE, "a3-highgpu-8g", "H100-80", 8, False)
EAST = Pool("us-east1-b", "a3-highgpu-8g", "H100-80", 8, False)
REGIONS = {"us-central1": {}, "us-east1": {}}
NO_RIGHT = GceError("permission", "Required 'cloudquotas.quotas.get' permission", 403)


def entry(value: object, *regions: str, **dimensions: str) -> dict[str, Any]:
    return {
        "dimensions": dimensions,
        "details": {"value": value},
        "applicableLocations": list(regions),
    }


def test_an_entry_for_one_region_comes_before_one_for_several():
    info = {
        "dimensionsInfos": [
            entry("16", "us-central1", region="us-central1", gpu_family="NVIDIA_H100"),
            entry("0", "us-central1", "us-east1", gpu_family="NVIDIA_H100"),
            entry("-1", "us-east1", gpu_family="NVIDIA_H200"),
            entry("7", "us-east1"),
            entry("many", "us-west1", gpu_family="NVIDIA_H100"),
            {"dimensions": {"gpu_family": "NVIDIA_B200"}, "applicableLocations": ["us-east1"]},
        ]
    }
    assert read_families(info) == {
        ("us-central1", "NVIDIA_H100"): 16,
        ("us-east1", "NVIDIA_H100"): 0,
        ("us-east1", "NVIDIA_H200"): math.inf,
    }
    assert read_families({}) == {}


def test_only_newer_gpus_have_a_family():
    assert family_of("H100-80") == "NVIDIA_H100"
    assert family_of("B200-180") == "NVIDIA_B200"
    assert family_of("A100-80") is None


class Api:
    """Answers as a test tells, and counts."""

    def __init__(self, *answers: dict[str, Any] | GceError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def get_json(self, url: str, _query: dict[str, str]) -> dict[str, Any]:
        self.asked.append(url)
        answer = self.answers.pop(0)
        if isinstance(answer, GceError):
            raise answer
        return answer


SIXTEEN = {"dimensionsInfos": [entry("16", "us-central1", gpu_family="NVIDIA_H100")]}


def test_limits_are_kept_for_an_hour_and_after_a_failure_the_last_ones():
    now, api = [0.0], Api(NO_RIGHT, SIXTEEN, GceError("unknown", "no answer"), SIXTEEN)
    families = FamilyQuotas(api, config("http://fake"), lambda: now[0])

    def limit(at: float) -> tuple[float | None, str]:
        now[0] = at
        found = asyncio.run(families.limits())
        return found.limit("us-central1", "NVIDIA_H100"), found.trouble

    assert limit(0.0) == limit(RETRY_S - 1) == (None, NO_RIGHT.text)
    assert limit(RETRY_S) == limit(RETRY_S + KEPT_S - 1) == (16, "")
    assert limit(RETRY_S + KEPT_S) == (16, "no answer")
    assert limit(2 * RETRY_S + KEPT_S) == (16, "")
    assert len(api.asked) == 4
    assert api.asked[0].startswith("http://fake/v1/projects/test-project/locations/global/services")


def read(api: Api) -> tuple[QuotaUsage, ...]:
    families = asyncio.run(FamilyQuotas(api, config("http://fake"), lambda: 0.0).limits())
    there = [
        Instance(str(number), "a", each, "running", 0.0, "r")
        for number, each in enumerate((H100, H100, EAST, pool(spot=False)))
    ]
    return quotas_of((H100, EAST), REGIONS, {}, families, there)


def test_what_this_cluster_rented_counts_against_a_familys_quota():
    here, east = read(Api(SIXTEEN))
    name = "GPUS_PER_GPU_FAMILY of NVIDIA_H100 in us-central1"
    assert (here.name, here.pools, here.limit_gpus, here.used_gpus) == (name, (H100,), 16, 16)
    assert (east.limit_gpus, east.used_gpus) == (None, 8)
    assert east.why_unknown == "Google lists none there"


def test_an_unknown_quota_limits_nothing_and_is_shown_as_unknown():
    quotas = read(Api(NO_RIGHT))
    assert {quota.limit_gpus for quota in quotas} == {None}
    state = CapacityState(prices={H100: 88.0}, quotas=quotas)
    assert obtainable(state, H100) == state.policy.machines_per_pool_max
    assert possible_supplies(state, (H100,))[0].obtainable == state.policy.machines_per_pool_max
    view = {"name": quotas[0].name, "limit_gpus": None, "used_gpus": 16.0,
            "why_unknown": quotas[0].why_unknown}  # fmt: skip
    shown = {"zone": HERE, "machine": H100.machine, "spot": False, "flex": False,
             "usd_per_hour": 88.0, "wanted": 0, "up": 2, "awaited": 0, "asked": 0, "waits_s": None,
             "obtainable": 16, "stopped": "", "rest": None, "quotas": [view]}  # fmt: skip
    money = {"usd_per_hour": 0.0, "usd_per_hour_max": None, "spent_usd": 0.0, "usd_max": None,
             "unpriced": [], "stop": ""}  # fmt: skip
    text = capacity_text({"provider": "gce", "leads": True, "pools": [shown], "machines": [],
                          "orphans": [], "strangers": [], "deadline": "",
                          "money": money})  # fmt: skip
    assert f"16 GPUs used of an unknown limit: {NO_RIGHT.text}" in text
