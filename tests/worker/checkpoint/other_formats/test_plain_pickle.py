"""What other programs have pickled is read without more memory than what is used of it."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.checkpoint.other_formats.plain_pickle import load_with_stubs


def test_weights_beside_what_is_asked_for_stay_in_their_file(tmp_path):
    """DeepSpeed's file with the number of its step holds the whole model in 16 bits, too."""
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"global_steps": 3, "module": {"weight": torch.ones(1 << 16)}}, file)
    found = load_with_stubs(file)
    assert str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert (found["global_steps"], int(found["module"]["weight"].sum())) == (3, 1 << 16)
