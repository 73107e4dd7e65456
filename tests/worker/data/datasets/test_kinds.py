"""Blends, streams, packed rows and padding; what is wrong with data is said with its sample."""

from __future__ import annotations

import errno
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sailor
from simulator.documents.problems import InputError
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.datasets.packing import pack


def data_of(dataset, *, batch=4, **options):
    return MapData(dataset, options.pop("collate", default_collate), batch, 0, **options)


def problem_of(dataset, step=0, **options):
    with pytest.raises(InputError) as told:
        data_of(dataset, **options).batch(step, range(4))
    return str(told.value)


# -- blends ---------------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), number=st.integers(0, 300))
def test_turns_are_exact_and_spread(weights, number):
    blend = sailor.Blend(*(([0], weight / 10) for weight in weights))
    turns = [blend.turn(each) for each in range(number)]
    for part, weight in enumerate(weights):
        own = [before for of, before in turns if of == part]
        assert own == list(range(len(own))), "each data set counts its own samples"
        assert abs(len(own) - number * weight / sum(weights)) < len(weights)


def test_invalid_blends_are_refused():
    for given_, reason in [
        ([], "has no data sets"),
        ([([1], 0)], "has the weight 0"),
        ([([1], float("nan"))], "has the weight nan"),
        ([([], 1)], "data set 0: is empty"),
        ([(iter([1]), 1)], "has no len"),
        ([([1], 0.123456789), ([1], 1)], "round the weights"),
    ]:
        with pytest.raises(InputError, match=reason):
            sailor.Blend(*given_)


# -- the last batch of an epoch -------------------------------------------------------------------


def test_without_the_last_batch_epochs_are_those_of_torchs_loader():
    samples = torch.arange(10)
    epoch = list(torch.utils.data.DataLoader(samples, 4, drop_last=True))
    data = data_of(samples, shuffled=False, drop_last=True)
    for step, wanted in enumerate(epoch * 3):
        assert torch.equal(data.batch(step, range(4)).inputs, wanted)


def test_without_the_last_batch_each_epoch_leaves_out_others():
    data = data_of(torch.arange(10), drop_last=True)
    left_out = []
    for epoch in range(40):
        steps = (2 * epoch, 2 * epoch + 1)
        drawn = [int(each) for step in steps for each in data.batch(step, range(4)).inputs]
        assert len(set(drawn)) == 8
        left_out += set(range(10)) - set(drawn)
    assert set(left_out) == set(range(10))


# -- streams --------------------------------------------------------------------------------------


def test_a_stream_is_opened_where_it_is_needed():
    opened = []

    def source(start):
        opened.append(start)
        return count(start)

    data = data_of(sailor.Stream(source))
    assert data.batch(5, [2, 3]).inputs.tolist() == [22, 23]
    assert data.batch(5, [2, 3]).inputs.tolist() == [22, 23], "a step may be repeated"
    assert data.batch(6, range(4)).inputs.tolist() == [24, 25, 26, 27]
    assert opened == [22], "what follows is read on"
    assert data.batch(8, [1]).inputs.tolist() == [33]
    assert opened == [22]
    assert data.batch(8, [0]).inputs.tolist() == [32], "places of a step come in any order"
    assert data.batch(2, [1]).inputs.tolist() == [9]
    assert opened == [22, 9]


def test_what_a_stream_draws_depends_on_the_sample_alone():
    def source(start):
        return (torch.rand(1) + number for number in count(start))

    first = data_of(sailor.Stream(source)).batch(3, range(4))
    again = data_of(sailor.Stream(source))
    again.batch(1, range(4))
    assert torch.equal(again.batch(3, range(4)).inputs, first.inputs)


def test_streams_that_end_or_cannot_be_read_again_are_refused():
    assert problem_of(sailor.Stream(range(6)), step=1).startswith(
        "Stream: ended after 6 samples, in step 1; give fewer steps"
    )
    with pytest.raises(InputError, match="can be read only once"):
        sailor.Stream(each for each in range(3))
    with pytest.raises(InputError, match="cannot be read from a int"):
        sailor.Stream(3)
    with pytest.raises(InputError, match="is a Stream, which has no epochs; give steps"):
        sailor.Trainer(torch.nn.Linear(1, 1), sailor.Stream([1]), batch_size=1, epochs=1)


# -- packed rows ----------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_rows_hold_each_sample_once_and_no_more_than_fits(lengths):
    rows = pack(lengths, 20)
    assert Counter(index for row in rows for index in row) == Counter(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < each <= 20 for each in filled)
    assert sum(each <= 10 for each in filled) <= 1, "two half-empty rows would have been one"


def test_a_row_has_positions_and_labels_of_its_documents():
    samples = [{"input_ids": [5, 6, 7], "labels": [1, 2, -100]}, {"input_ids": [8, 9]}]
    rows = sailor.Packed(samples, 7, pad_id=3, segments=True)
    assert len(rows) == 1
    assert {name: value.tolist() for name, value in rows[0].items()} == {
        "input_ids": [5, 6, 7, 8, 9, 3, 3],
        "labels": [-100, 2, -100, -100, 9, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1],
        "segment_ids": [1, 1, 1, 2, 2, 0, 0],
    }


def test_given_lengths_spare_reading_all_samples():
    class Unread(list):
        def __getitem__(self, index):
            raise AssertionError("it was read")

    assert sailor.Packed(Unread([0, 0, 0]), 5, lengths=[2, 4, 3]).rows == [(1,), (2, 0)]


def test_lengths_are_read_from_their_file_by_later_processes(tmp_path):
    class Counted(list):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    samples = Counted({"input_ids": [1] * length} for length in (2, 4, 3))
    cache = tmp_path / "made" / "lengths.npy"
    rows = sailor.Packed(samples, 5, cache=cache).rows
    assert Counted.read == 3
    assert sailor.Packed(samples, 5, cache=cache).rows == rows == [(1,), (2, 0)]
    assert Counted.read == 3, "not again"
    samples.append({"input_ids": [1]})
    assert sailor.Packed(samples, 5, cache=cache).rows == [(1, 3), (2, 0)]
    assert Counted.read == 7, "other data has other lengths"
    for broken in (b"", b"no array", cache.read_bytes()[:-5]):
        cache.write_bytes(broken)
        assert sailor.Packed(samples, 5, cache=cache).rows == [(1, 3), (2, 0)]
    assert list(cache.parent.iterdir()) == [cache], "nothing unfinished is left"
    with pytest.raises(InputError, match="cannot be written"):
        sailor.Packed(samples, 5, cache="/proc/no/lengths.npy")


def test_full_disk_leaves_no_unfinished_cache(tmp_path, monkeypatch):
    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(InputError, match="No space left"):
        sailor.Packed([{"input_ids": [1]}], 5, cache=tmp_path / "lengths.npy")
    assert list(tmp_path.iterdir()) == []


def test_samples_that_cannot_be_packed_are_named():
    for samples, reason in [
        ([{"input_ids": [1]}, {"input_ids": [1] * 9}], "sample 1: has 9 tokens, more than a row"),
        ([{"text": "a"}], "sample 0: is not a mapping with input_ids"),
        ([{"input_ids": []}], "sample 0: is empty"),
        ([{"input_ids": [7, 0], "attention_mask": [1, 0]}], "sample 0: has padding"),
    ]:
        with pytest.raises(InputError, match=reason):
            sailor.Packed(samples, 8)
    with pytest.raises(InputError, match="has 1 lengths for 2 samples"):
        sailor.Packed([{}, {}], 8, lengths=[1])
    grown = sailor.Packed([{"input_ids": [1] * 6}], 8, lengths=[2])
    assert len(grown[0]["input_ids"]) == 8
    grown = sailor.Packed([{"input_ids": [1] * 9}], 8, lengths=[2])
    assert "no longer fit" in problem_of(grown)


# -- pieces and padding ---------------------------------------------------------------------------


def test_pieces_of_a_token_file_are_inputs_and_labels(tmp_path):
    with (tmp_path / "tokens").open("wb") as file:
        np.save(file, np.arange(11, dtype=np.uint32))
    pieces = sailor.Tokens(tmp_path / "tokens", 4)
    assert len(pieces) == 2
    assert pieces[1]["input_ids"].tolist() == pieces[1]["labels"].tolist() == [4, 5, 6, 7]
    with pytest.raises(InputError, match="holds 11 tokens, fewer than the 12 of one sample"):
        sailor.Tokens(tmp_path / "tokens", 12)


def test_padding_fills_each_entry_with_what_is_not_counted():
    items = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "weight": 2.0},
        {"input_ids": [4], "labels": [4], "weight": 1.0},
    ]
    batch = sailor.pad(items, pad_id=9)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 9, 9]],
        "labels": [[1, 2, 3], [4, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "weight": [2.0, 1.0],
    }
    assert sailor.pad(items, length=5)["input_ids"].shape == (2, 5)
    with pytest.raises(InputError, match="got 3 input_ids, more than the length of 2"):
        sailor.pad(items, length=2)
    with pytest.raises(InputError, match="got a tuple; give mappings"):
        sailor.pad([(1, 2)])


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_padding_keeps_fractions_beside_whole_numbers(order):
    items = [{"w": [1, 1], "n": 1}, {"w": [0.5], "n": 0.5}][order]
    batch = sailor.pad(items)
    assert batch["w"].tolist() == [[1.0, 1.0], [0.5, 0.0]][order]
    assert batch["n"].tolist() == [1.0, 0.5][order]


# -- bad samples ----------------------------------------------------------------------------------


def test_samples_of_different_lengths_ask_for_padding():
    samples = [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2)]
    assert problem_of(samples, shuffled=False).endswith(
        "give collate=sailor.pad, or a function of your own"
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (None, "is None; leave it out"),
        ({"input_ids": [], "labels": []}, "is empty; leave it out"),
        ({"input_ids": [1, 2], "labels": [3, 50257]}, "has 50257 in labels, and the model's voc"),
        ({"input_ids": [1, 2], "labels": [3, -1]}, "has -1 in labels"),
        ({"input_ids": [1, 60], "labels": [3, -100]}, "has 60 in input_ids"),
        ((torch.ones(2), 50), "has 50 in labels, and the model's vocabulary has 50 entries"),
    ],
)
def test_bad_samples_are_named(bad, reason):
    good = (torch.ones(2), 3) if isinstance(bad, tuple) else {"input_ids": [1, 2], "labels": [3, 4]}
    samples = [good] * 6 + [bad]
    limits = {"input_ids": 60, "labels": 50}
    told = problem_of(samples, step=1, shuffled=False, limits=limits)
    assert told.startswith("dataset: sample 6 (step 1, position 2): ")
    assert reason in told
    blend = sailor.Blend((samples[:6], 1), (samples, 1))
    assert "dataset 1: sample 6 (step 3, position 1)" in problem_of(
        blend, step=3, shuffled=False, limits=limits
    )


@pytest.mark.parametrize("collate", [default_collate, sailor.pad])
def test_texts_that_were_left_in_samples_are_named(collate):
    sample = {"input_ids": [1, 2], "text": "a", "words": ["b"], "gap": None}
    with pytest.raises(InputError, match="texts, or nothing, in text, words, gap; leave these"):
        data_of([sample] * 8, collate=collate).batch(0, [0, 1])
    with pytest.raises(InputError, match="has samples that are texts; convert them"):
        data_of(["a", "b"]).batch(0, [0, 1])


def test_data_that_changes_during_training_is_named():
    samples = [torch.ones(2)] * 8
    data = data_of(samples)
    data.batch(0, range(4))
    del samples[-1]
    with pytest.raises(InputError) as told:
        data.batch(1, range(4))
    assert str(told.value).startswith(
        "dataset: has 7 samples at step 1, and had 8 when the job began; keep the data as it was"
    )
    # A worker that starts later knows how many there were.
    assert "has 7 samples at step 0, and had 8" in problem_of(samples, sizes=(8,))


def test_a_sample_that_cannot_be_read_is_named():
    class Lies:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return [1, 2][index]

    assert problem_of(Lies(), shuffled=False).startswith(
        "dataset: sample 2 (step 0, position 2): cannot be read (IndexError: list index out"
    )

    class Fails(Lies):
        def __getitem__(self, index):
            raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError) as told:
        data_of(Fails(), shuffled=False).batch(0, [1])
    assert told.value.__notes__ == ["in dataset: sample 1 (step 0, position 1)"]

    class Misspelt(Lies):
        def __getitem__(self, index):
            return {"text": 1}["txt"]

    with pytest.raises(KeyError) as told:  # The error keeps its line: no other data would help.
        data_of(Misspelt(), shuffled=False).batch(0, [1])
    assert told.value.__notes__ == ["in dataset: sample 1 (step 0, position 1)"]
