"""What ``sailorctl capacity`` prints for a person."""

from __future__ import annotations

from typing import Any

from sailord.text.cluster_text import moment, table


def capacity_text(capacity: dict[str, Any]) -> str:
    """Pools, machines that are not simply up, and money."""
    if capacity["provider"] is None:
        return "no provider is configured: machines come by themselves (docs/capacity.md)"
    if not capacity["leads"]:
        return "nobody leads yet, so nobody knows of machines"
    lines = _pool_lines(capacity["pools"]) if capacity["pools"] else ["no pool yet"]
    for pool in capacity["pools"]:
        if pool["rest"] is not None:
            lines.append(f"{_name(pool)} rests {_rest(pool['rest'])}")
    for quota in sorted({_quota(q) for pool in capacity["pools"] for q in pool["quotas"]}):
        lines.append(quota)
    for machine in capacity["machines"]:
        if machine["state"] != "up":
            why = f": {machine['why']}" if machine["why"] else ""
            lines.append(f"{machine['name']} is {machine['state']}{why}")
    lines += [f"{name} would not be deleted" for name in capacity["orphans"]]
    if capacity["strangers"]:
        lines.append(f"not of this provider: {', '.join(capacity['strangers'])}")
    return "\n".join([*lines, _money(capacity["money"])])


def _pool_lines(pools: list[dict[str, Any]]) -> list[str]:
    heads = ("zone", "machine", "contract", "wanted", "up", "awaited", "asked", "more", "$/h")
    rows: list[tuple[str, ...]] = [heads]
    for pool in pools:
        price = "-" if pool["usd_per_hour"] is None else f"{pool['usd_per_hour']:,.2f}"
        counts = (str(pool[k]) for k in ("wanted", "up", "awaited", "asked", "obtainable"))
        rows.append((pool["zone"], pool["machine"], _contract(pool), *counts, price))
    return table(rows)


def _contract(pool: dict[str, Any]) -> str:
    return "spot" if pool["spot"] else "on demand"


def _name(pool: dict[str, Any]) -> str:
    return f"{pool['machine']} in {pool['zone']} ({_contract(pool)})"


def _rest(rest: dict[str, Any]) -> str:
    times = "" if rest["refusals"] == 1 else f", {rest['refusals']} times in a row"
    return f"until {moment(rest['until'])} ({rest['kind']}{times}): {rest['text']}"


def _quota(quota: dict[str, Any]) -> str:
    return f"quota {quota['name']}: {quota['used_gpus']:g} of {quota['limit_gpus']:g} GPUs used"


def _money(money: dict[str, Any]) -> str:
    text = f"${money['usd_per_hour']:,.2f} an hour"
    if money["usd_per_hour_max"] is not None:
        text += f" of ${money['usd_per_hour_max']:,.2f}"
    text += f", ${money['spent_usd']:,.2f} so far"
    if money["usd_max"] is not None:
        text += f" of ${money['usd_max']:,.2f}"
    if money["unpriced"]:
        text += f", without {', '.join(money['unpriced'])}, whose price nobody knows"
    return text + {"": "", "parting": "; what is unused goes", "ended": "; all goes"}[money["stop"]]


def glance_problems(glance: dict[str, Any] | None) -> list[str]:
    """What is wrong with rented machines, for the doctor."""
    if glance is None:
        return []
    found = [
        f"{name} would not be deleted, and costs money; delete it by hand"
        for name in glance["orphans"]
    ]
    if glance["stop"]:
        found.append("the budget for machines is spent; raise [capacity] usd_max and restart")
    if glance["resting"] and glance["up"] < glance["wanted"]:
        found.append("machines are missing that were refused; sailorctl capacity says why")
    return found
