"""A job goes on in the order of samples in which it began, or says what is another one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

import sailor
from simulator.documents.problems import InputError
from tests.worker.training_runs import alone, small_job
from worker.checkpoint.load_state import progress_from, saved_progress
from worker.checkpoint.snapshot_file import progress_of
from worker.checkpoint.snapshots.snapshot_manager import continue_from
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.sample_order import check_order, order_text
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.precision import LossScale
from worker.training.trainer import RankTrainer, TrainingProgress

ONE, OTHER = list(range(20)), list(range(10))


def blend(*weights):
    return sailor.Blend(*zip((ONE, OTHER), weights, strict=True))


def data_of(dataset, *, batch_size=4, seed=0, **order):
    return MapData(dataset, default_collate, batch_size, seed, **order)


def saved_after(steps, data):
    """Return the progress of a run on some data, as files keep it."""
    progress = replace(TrainingProgress.first(LossScale(), data), step=steps)
    return progress_of(asdict(saved_progress(progress)))


CHANGES = {
    "shuffle": (
        data_of(ONE),
        data_of(ONE, shuffled=False),
        "dataset: has another order of samples than in the 40 steps before:"
        " shuffle is False, and was True; give what the script gave before",
    ),
    "drop_last": (
        data_of(ONE, shuffled=False),
        data_of(ONE, shuffled=False, drop_last=True),
        "the 40 steps before: drop_last is True, and was False; give",
    ),
    "both": (
        data_of(ONE),
        data_of(ONE, shuffled=False, drop_last=True),
        "shuffle is False, and was True; drop_last is True, and was False; give",
    ),
    "batch size and seed": (
        data_of(ONE),
        data_of(ONE, batch_size=8, seed=1),
        "batch_size is 8, and was 4; seed is 1, and was 0; give",
    ),
    "samples": (data_of(ONE), data_of(OTHER), r"samples is \[10\], and was \[20\]; give"),
    "weights": (
        data_of(blend(0.7, 0.3)),
        data_of(blend(0.5, 0.5)),
        r"before: weights is \[1, 1\], and was \[7, 3\]; give",
    ),
}


@pytest.mark.parametrize(("before", "now", "said"), CHANGES.values(), ids=CHANGES)
def test_each_change_of_the_order_is_refused_with_both_values(before, now, said):
    saved = saved_after(40, before)
    with pytest.raises(InputError, match=said):
        progress_from(saved).on(TrainingProgress.first(LossScale(), now))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (data_of(blend(7, 3)), data_of(blend(0.7, 0.3))),
        (data_of(sailor.Stream(ONE)), data_of(sailor.Stream(ONE), shuffled=False)),
    ],
    ids=["equal proportions", "a stream, which is never shuffled"],
)
def test_what_leaves_the_order_as_it_was_is_accepted(before, now):
    fresh = TrainingProgress.first(LossScale(), now)
    assert progress_from(saved_after(40, before)).on(fresh).step == 40


def test_before_the_first_step_any_order_may_be_taken():
    fresh = TrainingProgress.first(LossScale(), data_of(ONE, shuffled=False))
    assert progress_from(saved_after(0, data_of(ONE))).on(fresh).order == fresh.order


def test_training_continues_from_a_state_without_an_order_and_saves_one():
    saved = asdict(saved_after(40, data_of(ONE, shuffled=False)))
    del saved["order"]
    fresh = TrainingProgress.first(LossScale(), data_of(ONE))
    assert progress_from(progress_of(saved)).on(fresh).order == data_of(ONE).order


def test_what_another_version_says_of_the_order_is_not_compared():
    check_order(order_text(shuffle=True), order_text(shuffle=True, sampler=2), step=3)
    check_order(order_text(shuffle=True, sampler=2), order_text(shuffle=True), step=3)


def test_files_of_workers_of_two_versions_make_one_checkpoint():
    """One that does not know the order writes none; sailord compares the rest."""
    saved = saved_after(40, data_of(ONE))
    assert saved.order
    assert saved == replace(saved, order="")
    assert saved != replace(saved, step=41)


def test_a_rank_goes_on_in_the_same_order_alone():
    job = small_job()
    ranks = [
        RankTrainer(job, alone(job), 0, SingleRankTransport(), data_of(ONE, shuffled=each))
        for each in (True, False)
    ]
    same, other = ranks
    state = merge_ranks([rank_tensors(same.buffers.values())], tensors_of(job))
    saved = saved_after(40, data_of(ONE))
    for rank in ranks:
        rank.close()
    same.restore(state, progress_from(saved))
    continue_from(same, saved)
    assert same.progress.step == 40
    with pytest.raises(InputError, match="shuffle is False, and was True"):
        other.restore(state, progress_from(saved))
    with pytest.raises(InputError, match="shuffle is False, and was True"):
        continue_from(other, saved)


def test_another_number_of_data_sets_is_named():
    data = MapData(blend(1, 1), default_collate, 4, 0, sizes=(20,))
    said = "dataset: has 2 data sets with a length, and had 1 when the job began; keep the data"
    with pytest.raises(InputError, match=said):
        data.batch(0, range(2))
