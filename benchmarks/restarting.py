"""One rank of a run that restarts from checkpoints: what `torchrun` runs for reconfigure.py.

The same job, plan and trainer as under Sailor. After every step each rank saves its state with
``torch.save``, and a starting rank loads the newest state. Rank 0 writes a line about each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import load_plan
from worker.data.sources.open_data import open_data
from worker.distributed.process_groups import ProcessTransport
from worker.training.full_tensors import flats_by_kind
from worker.training.trainer import RankTrainer

DEADLINE_S = 600.0


def main(folder: Path, steps: int) -> None:
    """Run one rank from the saved state to the last step."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.set_num_threads(1)
    job = load_job(folder / "job.toml")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    transport = ProcessTransport(shared, rank, ranks, generation=str(life), deadline_s=DEADLINE_S)
    plan, data = load_plan(folder / "plan.json"), open_data(job, folder)
    trainer = RankTrainer(job, plan, rank, transport, data)
    state = {
        (number, kind): flat
        for number, memory in trainer.buffers.items()
        for kind, flat in flats_by_kind(memory).items()
    }
    saved = sorted(folder.glob("*.step"), key=lambda path: int(path.stem))
    if saved:
        found = torch.load(folder / f"{saved[-1].stem}-{rank}.pt", weights_only=False)
        for key, flat in state.items():
            flat.copy_(found["state"][key])
        trainer.progress = found["progress"]
    while trainer.progress.step < steps:
        report = trainer.step()
        step = trainer.progress.step
        if rank == 0:
            line = {"life": life, "step": step, "at": time.time(), "pid": os.getpid()}
            with (folder / "steps").open("a") as out:
                out.write(json.dumps(line | {"loss": report.loss}) + "\n")
        torch.save({"state": state, "progress": trainer.progress}, folder / f"{step}-{rank}.pt")
        if trainer.world_group is not None:
            trainer.world_group.all_reduce(torch.zeros(1))  # All have saved it.
        if rank == 0:
            (folder / f"{step}.step").touch()
        (folder / f"{step - 2}-{rank}.pt").unlink(missing_ok=True)
    transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
