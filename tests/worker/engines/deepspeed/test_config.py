"""DeepSpeed gets the job's optimizer with all of its constants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulator.spec.job import UpdateSettings
from tests.worker.training_runs import small_job
from worker.engines.deepspeed.config import optimizer_of


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("adam", {}, {"weight_decay": 0.0}),
        ("adam", {"weight_decay": 0.2}, {"weight_decay": 0.2}),
        ("adamw", {}, {"weight_decay": 0.01}),
        ("sgd", {"momentum": 0.5}, {"weight_decay": 0.0, "momentum": 0.5, "nesterov": False}),
        ("sgd", {"weight_decay": 0.2, "nesterov": True}, {"weight_decay": 0.2, "nesterov": True}),
        ("sgd", {"momentum": 0.0, "nesterov": True}, {"momentum": 0.0, "nesterov": False}),
    ],
)
def test_torchs_optimizer_is_made_with_the_jobs_constants(name, given, expected):
    job = replace(small_job(optimizer=name), update=UpdateSettings(**given))
    made = optimizer_of(job)
    own = {"torch_adam", "adam_w_mode"}  # DeepSpeed's, by which it chooses torch's class.
    params = {key: value for key, value in made["params"].items() if key not in own}
    kind = getattr(torch.optim, made["type"])
    group = kind([torch.nn.Parameter(torch.ones(1))], **params).param_groups[0]
    assert kind.__name__.lower() == name
    assert {key: group[key] for key in expected} == expected
