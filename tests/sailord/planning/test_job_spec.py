"""Submitted jobs are read, and may not name files."""

from __future__ import annotations

import pytest

from sailord.planning.job_spec import job_shape, read_job
from simulator.documents.problems import InputError
from tests.sailord.planning.requests import SPEC


def test_submitted_job_may_not_name_files_of_sailords_host():
    spec = '[model]\nconfig = "/etc/passwd"\n[training]\nglobal_batch = 4\n'
    with pytest.raises(InputError, match="names a file"):
        read_job(spec)


def test_job_shape_counts_shared_tensors_as_one_more_layer_and_piece():
    assert job_shape(read_job(SPEC)) == (7, 3)
