"""Finds the GPUs of this machine and tests them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.devices.cuda_trial import try_cuda
from agents.devices.nvml import (
    REBOOT,
    RESET,
    DeviceFacts,
    DriverError,
    DriverMissing,
    query_driver,
)
from simulator.documents.problems import InputError, Problem, Problems
from simulator.hardware.catalogue import Catalogue

EMULATED = re.compile(r"([1-9][0-9]?)x([A-Za-z0-9][A-Za-z0-9._-]*)\Z")
NO_DEVICE = 'install an NVIDIA GPU and its driver, or emulate some: emulate = "2xA100-40"'
MEMORY_SHARE = 0.08
"""How far the driver's figure of the memory may differ from the catalogue's: ECC takes a part."""
FREE_SHARE_LEAST = 0.9
BROKEN = "broken"
"""A file of this name in the state folder makes emulated devices faulty; it says how."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of this machine, all of one kind."""

    gpu: str
    count: int
    tflops: float
    """The highest rate that the catalogue declares for it."""
    is_emulated: bool


def read_emulated(text: str, catalogue: Catalogue, *, place: str = "--emulate") -> Devices:
    """Read ``2xA100-40``: emulated devices, with the rates of real ones.

    ``place`` is the option or key that it comes from.
    """
    match = EMULATED.match(text)
    if match is None:
        what = f"is {text[:40]!r}"
        raise InputError(Problem(place, what, "write COUNTxKIND, such as 2xA100-40"))
    try:
        known = catalogue.gpu_name(match[2])
    except InputError as error:
        problems = Problems()
        problems.take(error, place=place)
        raise InputError(problems.found) from None
    return _devices(known, int(match[1]), catalogue, is_emulated=True)


def probe(catalogue: Catalogue) -> Devices:
    """Find the devices; ``InputError`` if there are none that can be used.

    ``DriverError``: the driver does not answer, which may pass.
    """
    try:
        facts = query_driver()
    except DriverMissing as error:
        raise InputError(Problem("devices", str(error), NO_DEVICE)) from None
    return recognise(facts, catalogue)


def recognise(facts: Sequence[DeviceFacts], catalogue: Catalogue) -> Devices:
    """Find the devices in the catalogue; all must be of one kind."""
    if not facts:
        raise InputError(Problem("devices", "the driver reports no GPU", NO_DEVICE))
    problems = Problems()
    names = sorted({fact.name for fact in facts})
    if len(names) > 1:
        cure = "run one agent per kind, in containers"
        problems.add("devices", f"are of several kinds: {', '.join(names)}", cure)
    problems.raise_if_any()
    return _devices(_known_name(facts[0], catalogue), len(facts), catalogue, is_emulated=False)


def _known_name(fact: DeviceFacts, catalogue: Catalogue) -> str:
    """Find a product in the catalogue, by its name and the size of its memory."""
    cure = (
        "add this name to the aliases of the [gpu.NAME] that is as fast, in a catalogue file of "
        "your own, and set catalogue in agent.toml to that file"
    )
    # Drivers before 2021 leave the maker out; later ones put it in front of each name.
    for name in (fact.name, fact.name.removeprefix("NVIDIA ")):
        try:
            known = catalogue.gpu_name(name)
        except InputError:
            continue
        expected = catalogue.gpu(known).usable_memory_bytes
        if abs(fact.memory_bytes - expected) <= MEMORY_SHARE * expected:
            return known
        has, should = fact.memory_bytes / 2**30, expected / 2**30
        what = f'"{fact.name}" has {has:.1f} GiB, but {known} has {should:.1f} GiB'
        raise InputError(Problem("devices", what, cure))
    raise InputError(Problem("devices", f'unknown GPU "{fact.name}"', cure))


def _devices(known: str, count: int, catalogue: Catalogue, *, is_emulated: bool) -> Devices:
    peak_flops = max(catalogue.gpu(known).peak_flops.values())
    return Devices(known, count, peak_flops / 1e12, is_emulated)


async def self_test(devices: Devices, state: Path, *, is_working: bool) -> str:
    """Test what workers need; return why the node is not ready, or an empty text.

    ``is_working``: our workers use the devices' memory already.
    """
    try:
        trial = state / "trial"
        trial.write_bytes(bytes(1 << 16))
        trial.unlink()
    except OSError as error:
        return f"{state} cannot be written: {error.strerror}"
    if devices.is_emulated:
        return emulated_fault(state)
    try:
        facts = await asyncio.to_thread(query_driver)
    except DriverError as error:
        return str(error)
    if len(facts) != devices.count:
        return describe_missing(len(facts), devices)
    found = "; ".join(
        f"device {index} {fault}"
        for index, fact in enumerate(facts)
        for fault in faults(fact, index, is_working=is_working)
    )
    return found if found or is_working else await try_cuda(devices.count)


def emulated_fault(state: Path) -> str:
    """Return the fault that a file sets for emulated devices, or an empty text."""
    try:
        return (state / BROKEN).read_text(encoding="utf-8").strip() or "a device is broken"
    except OSError:
        return ""


def describe_missing(count: int, devices: Devices) -> str:
    """Describe a loss of devices."""
    return f"only {count} of {devices.count} devices are left: {REBOOT}"


def faults(fact: DeviceFacts, index: int, *, is_working: bool) -> list[str]:
    """Return the faults of a device, each with its cure."""
    reset = RESET.format(index=index)
    found = []
    if fact.repair_failed:
        found.append("has broken memory and no spare memory left: replace the device")
    if fact.repair_pending:
        found.append(f"needs a reset to retire broken memory: {reset}")
    elif fact.uncorrected_errors:
        found.append(
            f"had {fact.uncorrected_errors} memory errors that ECC could not correct: {reset}"
        )
    if fact.is_divided:
        found.append(f"is divided into MIG instances: `nvidia-smi -i {index} -mig 0`")
    if fact.is_prohibited:
        found.append(
            f"has a compute mode that prohibits all programs: `nvidia-smi -i {index} -c DEFAULT`"
        )
    if not is_working and fact.free_bytes < FREE_SHARE_LEAST * fact.memory_bytes:
        free, whole = fact.free_bytes / 2**30, fact.memory_bytes / 2**30
        found.append(f"has {free:.1f} of {whole:.1f} GiB free: another program uses it")
    return found
