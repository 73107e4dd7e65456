"""Text of ``sailorctl capacity``."""

from __future__ import annotations

from typing import Any

from sailord.text.table import table
from sailord.text.units import duration, timestamp

STATES = {"awaited": "starting", "silent": "up, its agent is silent", "going": "being deleted"}
"""How the states of the API are printed, where the words differ."""
STOPS = {
    "": "",
    "parting": "; unused instances are deleted",
    "ended": "; all instances are deleted",
}


def capacity_text(capacity: dict[str, Any]) -> str:
    """Return pools, instances that are not up, and cost."""
    if capacity["provider"] is None:
        return "no provider is configured: nodes join by themselves (docs/capacity.md)"
    if not capacity["leads"]:
        return "no leader elected yet; retry in about 10 s"
    lines = [_pool_table(capacity["pools"]) if capacity["pools"] else "no pool yet"]
    for pool in capacity["pools"]:
        if pool["waits_s"] is not None:
            waits = f"a request has waited for {duration(pool['waits_s'])} in the provider's queue"
            lines.append(f"{_name(pool)}: {waits}, at no cost")
        if pool["stopped"]:
            lines.append(f"{_name(pool)}: stopped: {pool['stopped']}")
        elif pool["rest"] is not None:
            lines.append(_cooldown(pool, pool["rest"]))
    lines += sorted({_quota(quota) for pool in capacity["pools"] for quota in pool["quotas"]})
    for machine in capacity["machines"]:
        if machine["state"] != "up":
            why = f": {machine['why']}" if machine["why"] else ""
            state = STATES.get(machine["state"], machine["state"])
            lines.append(f"{machine['name']} is {state}{why}")
    if none := capacity.get("why_not_rented"):  # An older sailord does not say it.
        lines.append(f"no instance is wanted, since there is no plan: {none}")
    if capacity["deadline"]:
        lines.append(f"deadline: {capacity['deadline']}")
    lines += [f"{name} could not be deleted and is still billed" for name in capacity["orphans"]]
    if capacity["strangers"]:
        lines.append(f"nodes not from this provider: {', '.join(capacity['strangers'])}")
    return "\n".join([*lines, _cost(capacity["money"])])


def _pool_table(pools: list[dict[str, Any]]) -> str:
    counts = {"wanted": "wanted", "up": "up", "awaited": "starting", "asked": "requested",
              "obtainable": "available"}  # fmt: skip
    header = ("zone", "machine", "contract", *counts.values(), "$/h")
    rows = []
    for pool in pools:
        price = "-" if pool["usd_per_hour"] is None else f"{pool['usd_per_hour']:,.2f}"
        numbers = (str(pool[key]) for key in counts)
        rows.append((pool["zone"], pool["machine"], _contract(pool), *numbers, price))
    return table(header, rows)


def _contract(pool: dict[str, Any]) -> str:
    if pool["flex"]:
        return "flex start"
    return "spot" if pool["spot"] else "on demand"


def _name(pool: dict[str, Any]) -> str:
    return f"{pool['machine']} in {pool['zone']} ({_contract(pool)})"


def _cooldown(pool: dict[str, Any], rest: dict[str, Any]) -> str:
    times = "" if rest["refusals"] == 1 else f", {rest['refusals']} refusals in a row"
    until = timestamp(rest["until"])
    return f"{_name(pool)}: cooldown until {until} ({rest['kind']}{times}): {rest['text']}"


def _quota(quota: dict[str, Any]) -> str:
    if quota["limit_gpus"] is None:
        why = quota["why_unknown"]
        return f"quota {quota['name']}: {quota['used_gpus']:g} GPUs used of an unknown limit: {why}"
    return f"quota {quota['name']}: {quota['used_gpus']:g} of {quota['limit_gpus']:g} GPUs used"


def _cost(money: dict[str, Any]) -> str:
    text = f"${money['usd_per_hour']:,.2f}/h"
    if money["usd_per_hour_max"] is not None:
        text += f" of at most ${money['usd_per_hour_max']:,.2f}/h"
    text += f", ${money['spent_usd']:,.2f} so far"
    if money["usd_max"] is not None:
        text += f" of at most ${money['usd_max']:,.2f}"
    if money["unpriced"]:
        text += f", without {', '.join(money['unpriced'])} (price unknown)"
    return text + STOPS[money["stop"]]
