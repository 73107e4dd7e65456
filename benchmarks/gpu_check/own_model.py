"""A user's model: a LLaMA of transformers, trained by ``sailor.Trainer`` and by a plain loop."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.setting import Setting, attempt, finish

STEPS = 12
BATCH = 8


class _Tokens:
    """Random tokens, each sample its own."""

    def __init__(self, vocab: int, sequence: int) -> None:
        self.vocab, self.sequence = vocab, sequence

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.sequence,), generator=draw)
        return {"input_ids": tokens, "labels": tokens}


def run(setting: Setting) -> dict[str, Any]:
    """Train whole models, then adapters."""
    vocab, sequence = (64, 16) if setting.is_quick else (32000, 2048)
    found: dict[str, Any] = {}
    for name, make in {"all weights": _llama, "LoRA": _lora}.items():
        model = partial(make, setting)
        ours = attempt(partial(_train_ours, setting, model, vocab, sequence))
        plain = attempt(partial(_train_plain, setting, model, vocab, sequence))
        found[name] = {"sailor": ours, "plain loop": plain}
        if isinstance(ours, dict) and isinstance(plain, dict):
            found[name]["sailor over plain loop"] = ours["step_s"] / plain["step_s"]
    return found


def _llama(setting: Setting) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - may be missing

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if not setting.is_quick:
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}
        sizes["num_hidden_layers"] = 20
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(**sizes, **heads, max_position_embeddings=2048)
        )
    return model


def _lora(setting: Setting) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - may be missing

    wanted = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(_llama(setting), wanted)


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.place)


def _figures(setting: Setting, seconds: list[float], losses: list[float], sequence: int) -> Any:
    step_s = statistics.median(seconds[2:])
    found = {
        "step_s": step_s,
        "tokens_per_s": BATCH * sequence / step_s,
        "first_and_last_loss": [losses[0], losses[-1]],
    }
    if setting.device == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated(setting.place) / 2**30
    return found


def _train_ours(setting: Setting, make: Callable[[], nn.Module], vocab: int, sequence: int) -> Any:
    import sailor  # noqa: PLC0415 - not for the plain loop

    _free(setting)
    begin_s = time.perf_counter()
    ended: list[float] = []
    trainer = sailor.Trainer(
        make(),
        _Tokens(vocab, sequence),
        batch_size=BATCH,
        steps=STEPS,
        optimizer=lambda module: torch.optim.AdamW(
            [each for each in module.parameters() if each.requires_grad], lr=1e-4
        ),
        shuffle=False,
        clip_norm=1.0,
        precision="bf16" if setting.device == "cuda" else "fp32",
        callbacks=[lambda _step, _values: ended.append(time.perf_counter())],
        name="own-model",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    losses = [report.loss for report in trainer.history]
    seconds = [report.seconds for report in trainer.history]
    found = _figures(setting, seconds, losses, sequence)
    between = [b - a for a, b in pairwise(ended[2:])]
    return {
        **found,
        "between_steps_s": statistics.median(between),
        "until_first_step_s": ended[0] - begin_s,
    }


def _train_plain(setting: Setting, make: Callable[[], nn.Module], vocab: int, sequence: int) -> Any:
    """Whole batches, as Sailor takes them here; autocast, torch's fused AdamW."""
    model = make()
    _free(setting)
    place = setting.place
    model.to(place).train()
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    data, seconds, losses = _Tokens(vocab, sequence), [], []
    for step in range(STEPS):
        finish(place)
        begin_s = time.perf_counter()
        samples = [data[step * BATCH + each] for each in range(BATCH)]
        batch = {k: torch.stack([each[k] for each in samples]).to(place) for k in samples[0]}
        with torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        finish(place)
        seconds.append(time.perf_counter() - begin_s)
    return _figures(setting, seconds, losses, sequence)
