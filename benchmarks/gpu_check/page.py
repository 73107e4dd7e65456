"""The page for people: the figures, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABOUT = {
    "machine": "The machine",
    "kernels": "Single operations",
    "training": "Training a LLaMA-like model on one device",
    "predictions": "Models of many shapes, and what was predicted",
    "own_model": "A model of transformers, trained by a script",
    "deepspeed": "DeepSpeed's engine beside ours",
    "snapshots": "Snapshots beside training",
    "transport": "Communication, and a killed rank",
    "deaths": "Ranks that die in each phase; the survivors train on",
    "recovery": "A cluster: kill -9 of a rank, of an agent and of a node",
}


def page_of(found: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    lines = [
        f"# GPU check of {found['date']}",
        "",
        f"`make gpu-check` on {found['device']}, in {found['seconds']:.0f} s"
        f"{', quick: its figures mean nothing' if found['quick'] else ''}.",
        "",
        "| part | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {_state(part)} |" for name, part in found["parts"].items()]
    for name, part in found["parts"].items():
        lines += ["", f"## {ABOUT[name]}", ""]
        if part["state"] != "done":
            lines.append(f"{part['state'].capitalize()}: {part['why']}")
            continue
        lines += ["| figure | |", "|---|---|"]
        lines += [f"| {title} | {value} |" for title, value in rows(part["found"])]
    return "\n".join(lines) + "\n"


def rows(found: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each figure with its name."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from rows(value, f"{before}, {name}" if before else str(name))
    elif isinstance(found, list) and any(isinstance(each, Mapping) for each in found):
        for number, each in enumerate(found):
            yield from rows(each, f"{before} {number}")
    else:
        yield before.replace("_", " "), _text(found)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "-"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _state(part: Mapping[str, Any]) -> str:
    if part["state"] != "done":
        return f"{part['state']}: {_text(part['why'])}"
    wrong = [
        f"{name}: {text}"
        for name, text in rows(part["found"])
        if text.startswith(("failed: ", "skipped: "))
    ]
    took = f"done in {part['seconds']:.0f} s"
    return "; ".join([took, *wrong])
