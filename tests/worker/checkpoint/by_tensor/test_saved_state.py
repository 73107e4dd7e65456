"""Whatever a storage raises becomes one sentence, and an older checkpoint is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fsspec.implementations.local import LocalFileSystem

from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import SPEC, chain
from worker.checkpoint.by_tensor.resume import open_resume_point
from worker.checkpoint.by_tensor.saved_state import open_saved_state


class HttpError(Exception):
    """As gcsfs raises it, which is no ``OSError``."""


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, step: int) -> None:
    """The storage refuses what belongs to a step."""
    allowed: Callable = getattr(LocalFileSystem, method)

    def asked(files, path, *args, **kwargs):
        if f"/1-{step}/" in path:
            raise HttpError("Forbidden, 403")
        return allowed(files, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, method, asked)


@pytest.mark.parametrize("method", ["cat_file", "open"])
def test_refused_checkpoint_is_an_error_that_names_the_next_older_one(
    tmp_path, monkeypatch, method
):
    older, _ = chain(tmp_path, 10, 20)
    refuse(monkeypatch, method, 20)
    with pytest.raises(InputError, match="Forbidden, 403") as told:
        open_resume_point(str(tmp_path / "j"), read_job(SPEC))
    assert f"the next older intact one is {older.durable.manifest}" in str(told.value)


def test_tensor_that_cannot_be_read_any_more_is_an_error_that_names_the_object(
    tmp_path, monkeypatch
):
    (made,) = chain(tmp_path, 10)
    state = open_saved_state(made.durable.manifest)
    state.objects._path = ""  # No object is open.
    refuse(monkeypatch, "open", 10)
    with pytest.raises(InputError, match=r"\.snap: cannot be read: Forbidden, 403"):
        state.tensor(next(iter(state.pieces.specs)), 0)
