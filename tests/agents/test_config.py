"""The agent's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.config import GPU_ABORT_S, load_config
from agents.core.model import Options


@pytest.mark.parametrize(
    ("given", "on_gpus"), [("", GPU_ABORT_S), ("[options]\nabort_s = 5.0\n", 5.0)]
)
def test_abort_takes_longer_on_gpus(tmp_path: Path, given: str, on_gpus: float) -> None:
    """Unless the operator has set how long."""
    path = tmp_path / "agent.toml"
    path.write_text(
        'cluster_name = "c"\nname = "a"\nstate = "state"\nkey = "key"\n'
        f'store = "embedded://{tmp_path}/store.db"\n{given}'
    )
    config = load_config(path)
    assert config.options_on(is_emulated=False).abort_s == on_gpus
    emulated = config.options_on(is_emulated=True).abort_s
    assert emulated == (5.0 if given else Options().abort_s)
