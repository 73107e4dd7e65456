"""Speed of single operations: matrix products, attention, the optimizer, copies."""

from __future__ import annotations

import mmap
import tempfile
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.setting import Setting, SkippedError, attempt, seconds_of
from worker.training.optimizer import OptimizerStep


def run(setting: Setting) -> dict[str, Any]:
    """Measure each operation; one that fails says so."""
    place = setting.place
    return {
        "products_tflops": {
            name: attempt(partial(_product, setting, place, name))
            for name in ("fp32", "tf32", "bf16", "fp16")
        },
        "attention_ms": {
            name: attempt(partial(_attention, setting, place, kernel))
            for name, kernel in {
                "flash": SDPBackend.FLASH_ATTENTION,
                "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
                "math": SDPBackend.MATH,
            }.items()
        },
        "optimizer": {
            "exact_ms": attempt(lambda: _optimizer(setting, place, is_fused=False)),
            "fused_ms": attempt(lambda: _optimizer(setting, place, is_fused=True)),
            "fused_bits_are_equal_at_any_offset": attempt(lambda: _bits(place)),
            "fused_and_exact_differ_by_at_most": attempt(lambda: _difference(place)),
        },
        "copies_gbytes_per_s": attempt(lambda: _copies(setting, place)),
        "a_file_outside_tmpfs": attempt(lambda: _pin_file(setting, place)),
    }


def _product(setting: Setting, place: torch.device, name: str) -> float:
    size = 128 if setting.is_quick else 8192
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    a, b = (torch.randn(size, size, device=place).to(types.get(name, torch.float32)) for _ in "ab")
    return 2 * size**3 / seconds_of(lambda: a @ b, place, setting.rounds) / 1e12


def _attention(setting: Setting, place: torch.device, kernel: SDPBackend) -> float:
    heads, sequence = (2, 64) if setting.is_quick else (16, 4096)
    shape = (1 if setting.is_quick else 2, heads, sequence, 64 if setting.is_quick else 128)
    query, key, value = (
        torch.randn(shape, device=place, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )

    def both() -> None:
        with sdpa_kernel(kernel):
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.backward(out.sum())

    return 1e3 * seconds_of(both, place, setting.rounds)


def _state(place: torch.device, count: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    weight, gradient, first, second = (torch.randn(count, device=place) for _ in range(4))
    return weight, gradient, first, second.abs()


def _optimizer(setting: Setting, place: torch.device, *, is_fused: bool) -> float:
    weight, gradient, *moments = _state(place, 1000 if setting.is_quick else 100_000_000)
    step = OptimizerStep("adamw", 1e-4, 0.5, 3, is_fused=is_fused)
    return 1e3 * seconds_of(
        lambda: step.apply(weight, gradient, tuple(moments)), place, setting.rounds
    )


def _bits(place: torch.device) -> bool:
    """Replicas hold a weight at different offsets, and must round it alike."""
    count, step = 100_003, OptimizerStep("adamw", 1e-3, 0.5, 3, is_fused=True)
    whole = _state(place, count)
    wanted = None
    for offset in (0, 1, 3, 8, 1021):
        here = [torch.zeros(count + offset, device=place)[offset:] for _ in whole]
        for mine, given in zip(here, whole, strict=True):
            mine.copy_(given)
        step.apply(here[0], here[1], (here[2], here[3]))
        if wanted is None:
            wanted = here[0].clone()
        if not torch.equal(here[0], wanted):
            return False
    return True


def _difference(place: torch.device) -> float:
    found = []
    for is_fused in (False, True):
        weight, gradient, *moments = _state(place, 100_000)
        step = OptimizerStep("adamw", 1e-3, 0.5, 3, is_fused=is_fused)
        step.apply(weight, gradient, tuple(moments))
        found.append(weight)
    return float((found[0] - found[1]).abs().max())


def _copies(setting: Setting, place: torch.device) -> dict[str, Any]:
    if place.type != "cuda":
        raise SkippedError("a CPU has no memory of its own")
    from worker.checkpoint.snapshots.snapshot_writer import pin, unpin  # noqa: PLC0415 - needs xxhash

    size = 2**26 if setting.is_quick else 2**30
    there = torch.empty(size, dtype=torch.uint8, device=place)
    pageable, pinned = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    pinned = pinned.pin_memory()
    body = mmap.mmap(-1, size)
    mapped = torch.frombuffer(body, dtype=torch.uint8)
    found = {
        "to the GPU, pageable": lambda: there.copy_(pageable),
        "to the GPU, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "from the GPU, pageable": lambda: pageable.copy_(there),
        "from the GPU, pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    rates: dict[str, Any] = {
        name: size / seconds_of(copy, place, setting.rounds) / 1e9 for name, copy in found.items()
    }
    rates["a mapped file can be pinned"] = pin(body)
    if rates["a mapped file can be pinned"]:
        into = seconds_of(lambda: mapped.copy_(there, non_blocking=True), place, setting.rounds)
        rates["from the GPU, pinned file"] = size / into / 1e9
        unpin(body)
    return rates


def _pin_file(setting: Setting, place: torch.device) -> dict[str, bool]:
    """CUDA may refuse to pin a file that is not on tmpfs; training goes on with slower copies."""
    if place.type != "cuda":
        raise SkippedError("a CPU has no memory of its own")
    from worker.checkpoint.snapshots.snapshot_writer import pin, unpin  # noqa: PLC0415 - needs xxhash

    with tempfile.NamedTemporaryFile(dir=setting.out) as file:
        file.truncate(2**20)
        body = mmap.mmap(file.fileno(), 2**20)
        is_pinned = pin(body)
        if is_pinned:
            unpin(body)
        try:
            works = float(torch.zeros(8, device=place).sum()) == 0
        except RuntimeError:
            works = False
        body.close()
    return {"can_be_pinned": is_pinned, "the_next_kernel_works": works}
