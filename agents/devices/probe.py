"""The devices of this machine: what they are, and whether they can be used."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.devices.nvml import DriverError, Fact, ask_driver
from simulator.documents.problems import InputError, Problem, Problems
from simulator.hardware.catalogue import Catalogue

EMULATED = re.compile(r"([1-9][0-9]?)x([A-Za-z0-9][A-Za-z0-9._-]*)\Z")
NO_DEVICE = "give the machine an NVIDIA GPU with its driver, or use --emulate 2xA100-40"
MEMORY_SHARE = 0.08
"""By so much a driver's word of the memory may differ from the catalogue's: ECC costs a part."""
FREE_SHARE_LEAST = 0.9
ANEW = "start the machine anew"
RESET = f"reset it with `nvidia-smi --gpu-reset -i {{index}}`, or {ANEW}"
BROKEN = "broken"
"""A file of this name in the state folder says what is wrong with devices that are not there."""


@dataclass(frozen=True, slots=True)
class Devices:
    """So many GPUs of one kind."""

    gpu: str
    count: int
    tflops: float
    """Declared: the best of the catalogue's rates for it."""
    is_emulated: bool


def read_emulated(text: str, catalogue: Catalogue) -> Devices:
    """Read ``2xA100-40``: devices that are not there, with the speed of those that could be."""
    match = EMULATED.match(text)
    if match is None:
        what = f"is {text[:40]!r}"
        raise InputError(Problem("--emulate", what, "give how many of what, as in 2xA100-40"))
    try:
        known = catalogue.gpu_name(match[2])
    except InputError as error:
        problems = Problems()
        problems.take(error, place="--emulate")
        raise InputError(problems.found) from None
    return _devices(known, int(match[1]), catalogue, is_emulated=True)


def probe(catalogue: Catalogue) -> Devices:
    """Ask the driver; ``InputError`` says that there is no GPU, or what cannot be used."""
    try:
        facts = ask_driver()
    except DriverError as error:
        raise InputError(Problem("devices", str(error), NO_DEVICE)) from None
    return recognise(facts, catalogue)


def recognise(facts: Sequence[Fact], catalogue: Catalogue) -> Devices:
    """Say what the catalogue calls the devices; all must be of one kind."""
    if not facts:
        raise InputError(Problem("devices", "the driver knows no GPU", NO_DEVICE))
    problems = Problems()
    names = sorted({fact.name for fact in facts})
    if len(names) > 1:
        cure = "give each kind to a machine, or a container, of its own"
        problems.add("devices", f"are of several kinds: {', '.join(names)}", cure)
    problems.raise_if_any()
    return _devices(_known_name(facts[0], catalogue), len(facts), catalogue, is_emulated=False)


def _known_name(fact: Fact, catalogue: Catalogue) -> str:
    """Find what the catalogue calls a product; an L40S is no L4."""
    cure = (
        "name the kind that is as fast: put this name into the aliases of its [gpu.NAME] in a file "
        "of your own, and that file into agent.toml as catalogue"
    )
    # Drivers before 2021 leave the maker out, and some put it before a name that has its own.
    for name in (fact.name, fact.name.removeprefix("NVIDIA ")):
        try:
            known = catalogue.gpu_name(name)
        except InputError:
            continue
        expected = catalogue.gpu(known).usable_memory_bytes
        if abs(fact.memory_bytes - expected) <= MEMORY_SHARE * expected:
            return known
        has, should = fact.memory_bytes / 2**30, expected / 2**30
        what = f'"{fact.name}" has {has:.1f} GiB, and {known} would have {should:.1f} GiB'
        raise InputError(Problem("devices", what, cure))
    raise InputError(Problem("devices", f'no GPU "{fact.name}" is known', cure))


def _devices(known: str, count: int, catalogue: Catalogue, *, is_emulated: bool) -> Devices:
    peak_flops = max(catalogue.gpu(known).peak_flops.values())
    return Devices(known, count, peak_flops / 1e12, is_emulated)


async def self_test(devices: Devices, state: Path, *, is_working: bool) -> str:
    """Try what workers will need; return why the node is not ready, or nothing.

    ``is_working``: workers of ours are on the devices already, and use their memory.
    """
    try:
        trial = state / "trial"
        trial.write_bytes(bytes(1 << 16))
        trial.unlink()
    except OSError as error:
        return f"{state} cannot be written: {error.strerror}"
    if devices.is_emulated:
        return told_broken(state)
    try:
        facts = await asyncio.to_thread(ask_driver)
    except DriverError as error:
        return str(error)
    if len(facts) != devices.count:
        return few_left(len(facts), devices)
    return "; ".join(
        f"device {index} {fault}"
        for index, fact in enumerate(facts)
        for fault in faults(fact, index, is_working=is_working)
    )


def told_broken(state: Path) -> str:
    """What somebody says is wrong with devices that are not there."""
    try:
        return (state / BROKEN).read_text(encoding="utf-8").strip() or "a device is broken"
    except OSError:
        return ""


def few_left(count: int, devices: Devices) -> str:
    """Say that some are gone."""
    return f"{count} devices are left of {devices.count}: {ANEW}"


def faults(fact: Fact, index: int, *, is_working: bool) -> list[str]:
    """What is wrong with a device, each with its cure."""
    reset = RESET.format(index=index)
    found = []
    if fact.repair_failed:
        found.append("has broken memory and nothing left to replace it: have it replaced")
    if fact.repair_pending:
        found.append(f"waits for a reset to take broken memory out of use: {reset}")
    elif fact.uncorrected_errors:
        found.append(f"had {fact.uncorrected_errors} errors that ECC could not correct: {reset}")
    if fact.is_divided:
        found.append(f"is cut into slices: `nvidia-smi -i {index} -mig 0`")
    if fact.is_closed:
        found.append(f"is closed to everybody: `nvidia-smi -i {index} -c DEFAULT`")
    if not is_working and fact.free_bytes < FREE_SHARE_LEAST * fact.memory_bytes:
        free, whole = fact.free_bytes / 2**30, fact.memory_bytes / 2**30
        found.append(f"has {free:.1f} of {whole:.1f} GiB free: something else uses it")
    return found
