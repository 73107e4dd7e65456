"""Every kind of data: each sample once, none lost, the same order, whatever plans come and go."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import sailor
from tests.worker.random_plan import any_plan
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import alone, drawn
from worker.checkpoint.load_state import progress_from, saved_progress
from worker.layout.tensor_table import tensors_of
from worker.script.recipe import Recipe
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer

BATCH, STEPS, WORDS = 6, 9, 40


class Small(nn.Module):
    """Predicts the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, input_ids, **_):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts(count, *, lengths=(6,), first=0):
    """Return samples of some lengths, each with tokens of its own."""
    found = []
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(WORDS, (lengths[number % len(lengths)],), generator=draw)
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def token_file(folder):
    with (folder / "tokens.npy").open("wb") as file:
        np.save(file, np.arange(137, dtype=np.uint16) % WORDS)
    return folder / "tokens.npy"


def hugging_face(samples):
    """Return the samples as a data set of Hugging Face, which reads them from Arrow."""
    datasets = pytest.importorskip("datasets", reason="data sets of Hugging Face")
    rows = [{name: value.tolist() for name, value in each.items()} for each in samples]
    return datasets.Dataset.from_list(rows).with_format("torch")


def noisy(sample):
    """Return another sample, which three kinds of generators draw."""
    length = len(sample["input_ids"])
    drawn = torch.as_tensor(np.random.randint(WORDS, size=length))
    tokens = (drawn + torch.randint(WORDS, (length,)) + random.randrange(WORDS)) % WORDS
    return {"input_ids": tokens, "labels": tokens}


class Drawing:
    """A stream that draws at its beginning, and for each sample."""

    def __iter__(self):
        shift = random.randrange(60)
        return (noisy(each) for each in texts(60, first=shift))


class DrawnTexts(list):
    """Samples that are drawn anew each time."""

    def __getitem__(self, index):
        return noisy(super().__getitem__(index))


class ShuffleBuffer:
    """A stream that draws which of the next eight samples comes next."""

    def __iter__(self):
        coming = texts(60)
        while coming:
            yield coming.pop(random.randrange(min(8, len(coming))))


KINDS = {
    "map": lambda _: {"dataset": texts(20)},
    "in its order": lambda _: {"dataset": texts(20), "shuffled": False},
    "varying lengths": lambda _: {"dataset": texts(20, lengths=(3, 9, 5)), "collate": sailor.pad},
    "hugging face": lambda _: {"dataset": hugging_face(texts(20))},
    "tokens": lambda folder: {"dataset": sailor.Tokens(token_file(folder), 6)},
    "packed": lambda _: {"dataset": sailor.Packed(texts(60, lengths=(3, 7, 5, 2)), 12)},
    "blend": lambda _: {"dataset": sailor.Blend((texts(20), 0.7), (texts(7, first=50), 0.3))},
    "loaded by processes": lambda _: {"dataset": DrawnTexts(texts(20)), "num_workers": 2},
    "stream": lambda _: {"dataset": sailor.Stream(lambda start: iter(texts(60)[start:]))},
    "stream read from its start": lambda _: {"dataset": sailor.Stream(texts(60))},
    "stream that draws": lambda _: {
        "dataset": sailor.Stream(lambda start: map(noisy, texts(60)[start:]))
    },
    "drawing stream read from its start": lambda _: {"dataset": sailor.Stream(Drawing())},
    "stream with a shuffle buffer": lambda _: {"dataset": sailor.Stream(ShuffleBuffer())},
}


class Recorded:
    """Notes in a file, since processes load too, which sample is at which place of which step."""

    def __init__(self, data, log) -> None:
        self._data, self._log = data, log

    def batch(self, step, positions):
        found = zip(positions, self._data._numbers(step, positions), strict=True)
        with self._log.open("a") as file:
            file.write("".join(f"{step} {at} {part} {number}\n" for at, (part, number) in found))
        return self._data.batch(step, positions)


def seen_in(log):
    """Return the sample at each place, by step and position."""
    seen: dict = {}
    for line in log.read_text().splitlines():
        step, position, *number = map(int, line.split())
        assert seen.setdefault((step, position), tuple(number)) == tuple(number)
    return seen


def go_on(recipe, job, plan, state, steps, log):
    """Train some steps as new processes under a plan do; return the state and the losses."""

    def body(transport):
        data = Recorded(recipe.data(job.data.samples), log)
        rank = RankTrainer(job, plan, transport.rank, transport, data, module=recipe)
        if state is not None:
            tensors, saved = state
            rank.restore(tensors, progress_from(saved))
        losses = [rank.step().loss for _ in range(steps)]
        rank.close()
        return losses, rank_tensors(rank.buffers.values()), saved_progress(rank.progress)

    ranks = run_as_threads(plan.device_count, body)
    tensors = merge_ranks([pieces for _, pieces, _ in ranks], tensors_of(job))
    assert len({progress for _, _, progress in ranks}) == 1
    return (tensors, ranks[0][2]), ranks[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_their_order_survive_any_change_of_plan(kind, tmp_path, examples):
    torch.manual_seed(0)
    recipe = Recipe(model=Small(), batch_size=BATCH, steps=STEPS, **KINDS[kind](tmp_path))
    job = recipe.job()
    assert job.data.num_workers == recipe.num_workers
    (_, wanted), losses = go_on(recipe, job, alone(job), None, STEPS, tmp_path / "calm")
    calm = seen_in(tmp_path / "calm")
    assert len(calm) == BATCH * STEPS
    assert_each_once(recipe, calm, job.data.samples)
    for case in range(max(examples // 20, 2)):
        draw, state, found = drawn(f"{kind} {case}"), None, []
        log = tmp_path / str(case)
        while len(found) < STEPS:
            steps = draw.randint(1, min(4, STEPS - len(found)))
            plan = any_plan(draw, job, ranks_max=5)
            state, more = go_on(recipe, job, plan, state, steps, log)
            found += more
        assert state[1] == wanted, "the hash of all samples, and their number"
        assert seen_in(log) == calm
        assert found == pytest.approx(losses, rel=1e-5)


def assert_each_once(recipe, seen, sizes):
    """Compare what was loaded with whole epochs of each data set."""
    drawn_of = {}
    for place in sorted(seen):
        part, number = seen[place]
        drawn_of.setdefault(part, []).append(number)
    if isinstance(recipe.dataset, sailor.Stream):
        assert drawn_of == {0: list(range(BATCH * STEPS))}
        return
    assert sorted(drawn_of) == list(range(len(sizes)))
    for part, numbers in drawn_of.items():
        assert len(numbers) > sizes[part], "more than an epoch"
        for first in range(0, len(numbers), sizes[part]):
            epoch = numbers[first : first + sizes[part]]
            assert max(Counter(epoch).values()) == 1
        assert sorted(numbers[: sizes[part]]) == list(range(sizes[part]))


def test_a_blend_has_exact_proportions():
    recipe = Recipe(model=Small(), batch_size=BATCH, **KINDS["blend"](None))
    data = recipe.data()
    parts = [part for step in range(10) for part, _ in data._numbers(step, range(BATCH))]
    for first in range(0, 60, 10):
        assert Counter(parts[first : first + 10]) == {0: 7, 1: 3}
