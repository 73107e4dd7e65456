"""The nodes of a running cluster as a cluster file, to plan with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sailord.text.units import counted

USABLE = ("ready", "slow")
"""States of nodes that plans may use."""


def cluster_file_text(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return a pool for each kind of usable nodes, and as a comment what is left out.

    Prices and links are those of the catalogue: a file of one's own may say others.
    """
    pools: Counter[tuple[str, str, str, int, bool]] = Counter()
    others: Counter[str] = Counter()
    for node in nodes:
        if node["state"] in USABLE and node["gpus"]:
            key = node["zone"], node["machine"], node["gpu"], node["gpus"], node["spot"]
            pools[key] += 1
        elif node["state"] != "lost":
            others[node["state"] if node["gpus"] else "without GPUs"] += 1
    lines = ["# The nodes that plans may use now. Change counts or add pools: docs/formats.md."]
    lines += [f"# Left out: {counted(count, 'node')}, {why}." for why, count in others.items()]
    for (zone, machine, gpu, gpus, spot), count in sorted(pools.items()):
        lines += ["", "[[pool]]", f"zone = {json.dumps(zone)}"]
        if machine:
            lines += [f"machine = {json.dumps(machine)}", f"machines = {count}"]
        else:
            lines += [f"gpu = {json.dumps(gpu)}", f"gpus_per_machine = {gpus}"]
            lines += [f"gpus = {gpus * count}"]
        lines += ["spot = true"] * spot
    return "\n".join(lines)
