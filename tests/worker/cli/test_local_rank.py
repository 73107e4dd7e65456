"""How a rank of a run on this machine tells of its own device's errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worker.cli import local_rank
from worker.cli.local_launcher import RunFailedError
from worker.cli.local_rank import _reporting_errors


def test_out_of_memory_is_one_sentence_for_user_and_peers(capsys):
    heard = []
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, more."
    recorder = SimpleNamespace(activity_text="in forward of step 3")
    about = SimpleNamespace(abort=heard.append), 1, torch.device("cuda", 1), recorder
    with pytest.raises(RunFailedError) as failure, _reporting_errors(*about):
        raise torch.OutOfMemoryError(said)
    sentence = (
        "out of memory on cuda:1 of rank 1, in forward of step 3: CUDA out of memory. "
        "Tried to allocate 2.00 GiB"
    )
    assert (str(failure.value), heard) == (sentence, [sentence])
    assert "in test_out_of_memory" in capsys.readouterr().err


def test_timeline_on_a_gpu_waits_for_the_computing_stream_alone(monkeypatch):
    """The whole device would wait for receives that were requested ahead of the peer's sends."""
    waited, cuda = [], torch.cuda
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cuda, "synchronize", lambda *_: waited.append("device"))
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda _: 7)
    monkeypatch.setattr(local_rank, "set_up", lambda _: None)

    def one_span(*_, recorder, device):
        assert device.type == "cuda"
        with recorder.span("forward"):
            pass

    monkeypatch.setattr(local_rank, "_train", one_span)
    spec = SimpleNamespace(threads=1, device="cuda", keeps_spans=True, fail_at=None, deepspeed=None)
    board, sent = SimpleNamespace(write=lambda *_: None), []
    threads = torch.get_num_threads()
    try:
        local_rank.train(spec, 0, sent.append, board=board)
    finally:
        torch.set_num_threads(threads)
    assert waited == ["stream"]
    assert [len(each["spans"]) for each in sent] == [1]


def test_figures_of_an_evaluation_that_are_not_finite_are_no_json(monkeypatch):
    class Trained:
        def __init__(self, *_, **__):
            self.step = lambda: SimpleNamespace(step=0, line=dict)
            self.evaluate_if_due = lambda: {"loss": float("nan"), "accuracy": 0.5}
            self.log = self.end_log = self.close = lambda *_: None

    monkeypatch.setattr(local_rank, "RankTrainer", Trained)
    monkeypatch.setattr(local_rank, "_data_and_module", lambda _: (None, None))
    spec = SimpleNamespace(
        plan=SimpleNamespace(device_count=1), job=None, weights=None, steps=1, beginning=None,
        pieces=None, listening=SimpleNamespace(close=lambda: None),
    )  # fmt: skip
    sent = []
    local_rank._train(
        spec, 0, sent.append, device=torch.device("cpu"), recorder=local_rank.Recorder(0)
    )
    assert sent[1]["metrics"] == {"loss": None, "accuracy": 0.5}


def test_errors_of_a_script_are_left_as_they_are():
    about = (
        SimpleNamespace(abort=[].append),
        0,
        torch.device("cpu"),
        SimpleNamespace(activity_text=""),
    )
    with pytest.raises(KeyError), _reporting_errors(*about):
        raise KeyError("label")
