"""Which device a rank takes, and what it does there; torch's CUDA is replaced by a record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.worker.threads import run_as_threads
from tests.worker.training_runs import SomeLabels, plan_of, small_job
from worker.devices import rank_device
from worker.devices.rank_device import (
    DeviceMissingError,
    device_error,
    device_failure,
    has_flash,
    set_up,
    to_device,
)
from worker.training.precision import NumberFormats, formats_of, on_device
from worker.training.trainer import RankTrainer

GPU = torch.device("cuda", 1)


def test_promised_gpu_that_is_missing_is_refused():
    assert rank_device.rank_device(1, "cuda") == GPU
    with pytest.raises(DeviceMissingError, match=r"device 1: .* torch sees 0 .* nvidia-smi"):
        set_up(GPU)


def test_emulated_devices_never_take_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_device.rank_device(1, "cpu").type == "cpu"
    assert rank_device.rank_device(1, None) == GPU


def test_fp32_products_run_as_tf32_as_the_planner_assumes(monkeypatch):
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    used = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rank_device, "_cuda", SimpleNamespace(set_device=used.append))
    try:
        set_up(GPU)
        assert torch.get_float32_matmul_precision() == "high"
        assert used == [GPU]
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


class OnGpu(TorchFunctionMode):
    """Records how tensors are moved to a GPU that is not there."""

    def __init__(self) -> None:
        self.pinned, self.moves = [], []
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            self.pinned.append(id(args[0]))
            return args[0]
        if func is torch.Tensor.to and torch.device("cuda", 1) in args:
            self.moves.append((id(args[0]) in self.pinned, kwargs.get("non_blocking", False)))
            return args[0].to("meta")
        if func is torch.Tensor.to and kwargs.get("device") == GPU:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def test_batches_are_copied_from_pinned_memory_without_a_wait():
    with OnGpu() as seen:
        assert to_device(torch.ones(3), GPU, torch.bfloat16).dtype == torch.bfloat16
    assert seen.moves == [(True, True)]


def test_gpu_without_bf16_computes_in_fp32(monkeypatch):
    bf16 = formats_of(small_job(precision="bf16"))
    capability = {"old": (7, 5)}["old"]
    monkeypatch.setattr(
        rank_device, "_cuda", SimpleNamespace(get_device_capability=lambda _: capability)
    )
    found = on_device(bf16, GPU)
    assert (found.compute, found.wire) == (torch.float32, torch.bfloat16)
    assert on_device(bf16, torch.device("cpu")) is bf16


def test_torch_says_whether_a_gpu_runs_an_attention_as_flash(monkeypatch):
    asked = []
    monkeypatch.setattr(rank_device, "can_use_flash_attention", asked.append)
    on_gpu = SimpleNamespace(query=SimpleNamespace(device=GPU))
    assert not has_flash(on_gpu)
    assert asked == [on_gpu]
    assert has_flash(SimpleNamespace(query=torch.ones(1))), "CPUs need no flash attention"


def test_stages_on_gpus_with_and_without_bf16_train_together():
    job, plan = small_job(precision="bf16"), plan_of(2, (4, [(0, 2, 1), (2, 5, 1)]))
    bf16 = formats_of(job)
    old = NumberFormats("bf16", torch.float32, torch.float32, wire_as=torch.bfloat16)

    def losses(*precisions):
        def body(transport):
            trainer = RankTrainer(
                job, plan, transport.rank, transport, SomeLabels(job),
                precision=precisions[transport.rank],
            )  # fmt: skip
            return [trainer.step().loss for _ in range(2)]

        return run_as_threads(2, body)[0]

    assert losses(bf16, old) == pytest.approx(losses(bf16, bf16), rel=0.02)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'", "out of memory"),
        ("CUDA error: an illegal memory access was encountered", "a CUDA error"),
        ("Connection closed by peer [10.0.0.1]:4000", None),
        ("NCCL error: remote process exited or there was a network error", None),
    ],
)
def test_errors_of_the_ranks_own_device_are_not_reported_as_lost_peers(text, word):
    assert device_error(RuntimeError(text)) == word


def test_device_errors_name_rank_device_operation_and_step():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    about = {"rank": 3, "device": GPU, "activity": "in backward of step 7"}
    assert device_failure(error, **about) == (
        "out of memory on cuda:1 of rank 3, in backward of step 7: "
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert device_failure(ValueError("no such file"), **about) is None
