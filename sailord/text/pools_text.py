"""The nodes of a running cluster as a cluster file, to plan with."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sailord.text.units import counted

USABLE = ("ready", "slow")
"""States of nodes that plans may use."""


def cluster_file_text(
    nodes: Iterable[Mapping[str, Any]],
    sizes: Mapping[str, int],
    zones: Collection[str] | None = None,
) -> str:
    """Return a pool for each kind of usable nodes, and as a comment what is left out.

    ``zones`` are those of the catalogue: of others the file lacks what the planner must know.

    ``sizes`` are the GPUs of machine types that files may name; a node with fewer has lost some.
    Prices and links are those of the catalogue: a file of one's own may say others.
    """
    pools: defaultdict[tuple[str, str, str, bool], list[int]] = defaultdict(list)
    others: Counter[str] = Counter()
    for node in nodes:
        if node["state"] in USABLE and node["gpus"]:
            key = node["zone"], node["machine"], node["gpu"], node["spot"]
            pools[key].append(node["gpus"])
        elif node["state"] != "lost":
            others[node["state"] if node["gpus"] else "without GPUs"] += 1
    lines = ["# The nodes that plans may use now. Change counts or add pools: docs/formats.md."]
    lines += [f"# Left out: {counted(count, 'node')}, {why}." for why, count in others.items()]
    unknown = sorted({zone for zone, *_ in pools if zones is not None and zone not in zones})
    if unknown:
        lines.append(
            f"# Not in the catalogue: {', '.join(unknown)}. Copy from sailord's own cluster file"
            " its line `catalogue`,\n# with a full path, and its tables [[zone]] and [[zone_link]]."
        )
    for (zone, machine, gpu, spot), found in sorted(pools.items()):
        named = _size_of(machine, gpu)
        size = sizes.get(machine) or max(*found, named)
        left = sorted((gpus for gpus in found if gpus < size), reverse=True)
        lines += ["", "[[pool]]", f"zone = {json.dumps(zone)}"]
        if machine and not named:
            lines += [f"machine = {json.dumps(machine)}"]
        else:
            lines += [f"gpu = {json.dumps(gpu)}", f"gpus_per_machine = {size}"]
        lines += [f"machines = {len(found) - len(left)}"]
        lines += [f"gpus_left = {left}  # of machines that lost GPUs"] if left else []
        lines += ["spot = true"] * spot
    return "\n".join(lines)


def _size_of(machine: str, gpu: str) -> int:
    """Return the GPUs of a machine that is named like those of a pool by GPU kind; else 0."""
    size = machine.removeprefix(f"{gpu}x")
    return int(size) if size != machine and size.isdecimal() else 0
