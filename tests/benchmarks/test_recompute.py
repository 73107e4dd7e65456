"""What recomputing layers brings: the options of the program."""

from __future__ import annotations

import pytest

from benchmarks import recompute


def test_unknown_preference_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(recompute, "CASES", ())
    monkeypatch.setattr("sys.argv", ["recompute", "--prefer", "fast"])
    with pytest.raises(SystemExit) as ended:
        recompute.main()
    assert ended.value.code == 2
    assert "--prefer" in capsys.readouterr().err
