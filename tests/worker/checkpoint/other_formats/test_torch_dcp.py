"""What a folder of torch's DCP says beside tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.planning.job_spec import read_job
from tests.sailord.checkpoints.made import SPEC, make, whole_state
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.other_formats.convert import export_dcp, import_dcp
from worker.checkpoint.other_formats.torch_dcp import ORDER, DcpFolder
from worker.data.sample_order import order_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def exported(folder, order):
    """Export the state after ten steps in some order of samples."""
    whole = whole_state(SPEC, 10)
    whole = replace(whole, progress=replace(whole.progress, order=order))
    made = make(folder / "kept", 10, whole=whole)
    export_dcp(open_saved_state(made.durable.manifest), folder / "dcp")
    return folder / "dcp"


def test_an_import_says_what_is_different_in_the_order_of_samples(tmp_path, capsys):
    """A copy of a job may have another order, and the import says so."""
    same, other = order_text(seed=0, shuffle=True), order_text(seed=0, shuffle=False)
    about = exported(tmp_path, same), read_job(SPEC), "new"
    header = import_dcp(*about, tmp_path / "same.snap", order=same)
    assert (header.progress.order, capsys.readouterr().err) == (same, "")
    header = import_dcp(*about, tmp_path / "other.snap", order=other)
    assert header.progress.order == other
    assert capsys.readouterr().err == (
        "note: the job new has another order of samples than in the 10 steps before:"
        " shuffle is False, and was True\n"
    )


def test_a_state_that_does_not_say_its_order_is_exported_without(tmp_path, capsys):
    folder = exported(tmp_path, "")
    assert ORDER not in DcpFolder(folder).keys
    import_dcp(folder, read_job(SPEC), "new", tmp_path / "in.snap", order=order_text(seed=1))
    assert capsys.readouterr().err == ""
