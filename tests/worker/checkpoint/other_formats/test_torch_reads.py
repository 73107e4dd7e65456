"""Torch's own loader reads our DCP, and we read what FSDP2 writes on two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

from simulator.inputs.job_file import load_job
from tests.sailord.checkpoints.made import make, pieces_of
from tests.worker.checkpoint.other_formats.test_import_and_export import described
from tests.worker.warm import ROOT
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.other_formats.convert import export_dcp, import_dcp
from worker.models.weight_files.foreign_tensors import module_name

__all__ = ["described"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARDED = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo")
module = AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
for layer in module.model.layers:
    fully_shard(layer)
fully_shard(module)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
for _ in range(3):
    tokens = torch.arange(8)[None] + 3
    module(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
model, state = get_state_dict(module, optimizer)
dcp.save({"model": model, "optimizer": state}, checkpoint_id=sys.argv[2])
whole = {name: value.full_tensor() for name, value in module.state_dict().items()}
if dist.get_rank() == 0:
    torch.save(whole, sys.argv[3])
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # The end of torch's threads may abort a process that has done its work.
"""


def test_torch_goes_on_from_our_export(described, tmp_path):
    made = make(tmp_path / "kept", 10, spec=described.read_text())
    export_dcp(open_saved_state(made.durable.manifest), tmp_path / "dcp")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, state = get_state_dict(module, optimizer)  # Makes the moments.
    dcp.load(
        {"model": model, "optimizer": state},
        checkpoint_id=tmp_path / "dcp",
        planner=DefaultLoadPlanner(allow_partial_load=True),
        no_dist=True,
    )
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=state)
    named = dict(module.named_parameters())
    weights, *moments = made.whole.kinds
    for key, weight in weights.items():
        parameter = named[module_name(made.whole.job, *key)]
        held = optimizer.state[parameter]
        assert torch.equal(parameter, weight)
        assert torch.equal(held["exp_avg"], moments[0][key])
        assert torch.equal(held["exp_avg_sq"], moments[1][key])
        assert int(held["step"]) == 10


@pytest.mark.slow
def test_dcp_that_two_sharded_ranks_wrote_is_imported(described, tmp_path):
    (tmp_path / "shard.py").write_text(SHARDED)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", tmp_path / "shard.py"),
            *(tmp_path / "llama", tmp_path / "dcp", tmp_path / "whole.pt"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    job = load_job(described)
    header = import_dcp(tmp_path / "dcp", job, "j", tmp_path / "in.snap")
    assert (header.step, header.progress.samples) == (3, 12)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    # The same weights as one file, and so without moments.
    dcp.save({"model": whole}, checkpoint_id=tmp_path / "alone", no_dist=True)
    import_dcp(tmp_path / "alone", job, "j", tmp_path / "alone.snap")
    pairs = zip(pieces_of(tmp_path / "in.snap"), pieces_of(tmp_path / "alone.snap"), strict=True)
    for (key, body), (other, weights) in pairs:
        assert key == other
        third = len(body) // 3  # Of each piece: the weights, then two moments.
        assert bytes(body[:third]) == bytes(weights[:third])
        assert any(body[third:]) == bool(body)
