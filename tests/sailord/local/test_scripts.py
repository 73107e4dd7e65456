"""A user's script trains on a cluster that loses a node, to the losses of one process."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from safetensors.numpy import load_file

from tests.sailord.local.running import run_python, told_by
from tests.sailord.local.travel_cluster import FAILS_ON_B1

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from torch import nn

import sailor
from own_layers import block

torch.manual_seed(3)
blocks = [block(width=int(Path("width.txt").read_text())) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(32, 3))

class Data:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.005)  # So that there is time to lose a node.
        return torch.sin(torch.arange(32.0) * index), index % 3

data = Data()
sailor.Trainer(
    model,
    data,
    batch_size=12,
    steps=int(sys.argv[1]),
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    eval_dataset=[data[i] for i in range(12)],
    eval_every=10,
    metrics={"accuracy": lambda output, batch: (output.argmax(-1) == batch[1]).float()},
    name="own",
).train()
"""


EVALUATION = r"evaluation after (\d+) steps: loss (\S+), accuracy (\S+)"

LAYERS = """
from torch import nn

def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Tanh())
"""


@pytest.mark.parametrize(
    "words_of_tls", [pytest.param((), marks=pytest.mark.at_length), ("tls",)], ids=["plain", "tls"]
)
def test_a_script_survives_the_loss_of_a_node_with_the_losses_of_one_process(folder, words_of_tls):
    script = folder.parent / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "own_layers.py").write_text(LAYERS)
    (script.parent / "width.txt").write_text("32")
    own, saved = shutil.copytree(script.parent, folder.parent / "own"), folder.parent / "saved"
    words = ("-m", "worker", "run", "--job", script, "--json", "--save", saved, "--", "40")
    lines = run_python(*words, cwd=script.parent).splitlines()
    steps, evaluations = [], {}
    for line in map(json.loads, lines):
        if "evaluation" in line:
            evaluations[line["step"] + 1] = line["evaluation"]
        else:
            steps.append(line)
    alone = {str(line["step"] + 1): line["loss"] for line in steps}
    told = told_by("script_cluster", folder, script, *words_of_tls)
    certified = {name.partition("/")[0] for name in told["certified"]}
    assert certified == ({"sailord", "agent"} if words_of_tls else set())
    assert told["state"] == "done"
    assert len(told["generations"]) > 1
    assert told["losses"] == pytest.approx(alone, rel=1e-5)
    said = {
        int(found[1]): (float(found[2]), float(found[3]))
        for text in told["history"]
        if (found := re.fullmatch(EVALUATION, text))
    }
    wanted = {step: (each["loss"], each["accuracy"]) for step, each in evaluations.items()}
    assert said.keys() == wanted.keys() == {10, 20, 30, 40}
    for step, metrics in said.items():
        assert metrics == pytest.approx(wanted[step], rel=1e-4)
    assert [move["steps_lost"] for move in told["moves"]][1:] == [0] * (len(told["moves"]) - 1)
    durable, out = folder.parent / "durable", folder.parent / "out"
    export = ("-m", "sailord.cli.main", "checkpoint", "export", "own", "--at", durable, "--to", out)
    run_python(*export, "--job", own / "train.py", cwd=own)
    weights = load_file(saved / "model.safetensors")
    for name, value in load_file(out / "model.safetensors").items():
        assert abs(value - weights.pop(name)).max() < 1e-4
    assert not weights


def test_jobs_travel_with_their_setup_and_do_not_meet(folder):
    told = told_by("travel_cluster", folder.parent)
    one, two, raises = told["one"], told["two"], told["raises"]
    # The setup fails on one node: said once, with node, command, exit code and last line.
    assert one["state"] == "done", one
    failed = [line for line in one["history"] if "no disk" in line]
    assert len(failed) == 1
    assert failed[0].startswith("b1 cannot run it: setup `case ")
    assert failed[0].endswith("exited with 7: no disk")
    assert {member.partition(".")[0] for member in one["members"]} <= {"a1", "a2"}
    assert "no disk\nexited with 7" in told["setup"]["b1"]
    assert "$ pip install" in told["setup"]["a1"]
    # While it lasts, `nodes` names the node and what failed there.
    why = f"b1: setup `{FAILS_ON_B1}` exited with 7: no disk"
    assert why in one["seen"]
    # Another version for the next job, though workers come from the same fork servers.
    assert two["state"] == "done", two
    assert any("tiny 1.0 secret 23" in log for log in one["logs"].values())
    assert any("tiny 2.0 secret 23" in log for log in two["logs"].values())
    assert told["leaks"] == 0
    # What a script raises: the rank, the step and the line in the history, its frames in the log.
    assert raises["state"] == "held"
    said = "rank 0: after 17 steps: ValueError: sample 209 is damaged (train.py:20 in __getitem__"
    assert said in raises["reason"]
    (held,) = (line for line in raises["history"] if line.startswith("held: "))
    assert said in held
    log = next(log for log in raises["logs"].values() if "Traceback" in log)
    lines = log[log.index("Traceback") :].splitlines()
    assert lines[1].startswith('  File "train.py", line 20, in __getitem__')
    assert lines[3] == "ValueError: sample 209 is damaged"
    assert lines[-1].startswith(said.removeprefix("rank 0: "))
    # Steps that become non-finite: three are skipped, and each attempt goes on behind them.
    diverges = told["diverges"]
    assert (diverges["state"], diverges["step"]) == ("held", 13)
    said = (
        r"^3 attempts failed; the last: [ab][12] failed: rank \d: step 13: the output of layer 0 "
        r"is not finite on rank \d, the first such layer; "
        r"so were 3 steps before, whose updates were skipped"
    )
    assert re.search(said, diverges["reason"]), diverges["reason"]
    # Mounted records that shrink: noticed by the generation that reads them anew; nothing is lost.
    shrinks = told["shrinks"]
    assert shrinks["state"] == "held"
    said = (
        rf"a[12] failed: rank \d+: dataset: has 100 samples at step {shrinks['step']}, and had 240"
    )
    assert re.search(said, shrinks["reason"]), shrinks["reason"]
    assert "keep the data as it was while a job trains" in shrinks["reason"]
    # A node that did not run it shows its log of another job.
    logs = [log for log in shrinks["logs"].values() if "has 100 samples" in log]
    assert logs
    assert not any("Traceback" in log for log in logs)
