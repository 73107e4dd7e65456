"""A user's module trains to the same under any plan, and to what a plain loop of torch does."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from simulator.documents.problems import InputError
from tests.conftest import the_first_quick
from tests.worker.hf_families import (
    FAMILIES,
    MIXTURES,
    VOCABULARY,
    all_in_fp64,
    image_model,
    images,
    language_model,
    sentences,
)
from tests.worker.module_runs import STEPS, assert_close, plain_loop, recipe_of, trained
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.threads import ThreadTransport, ThreadWorld, run_as_threads
from tests.worker.training_runs import alone, drawn, plan_of
from worker.distributed.single_rank import SingleRankTransport
from worker.training.precision import formats_of
from worker.training.trainer import RankTrainer


@pytest.mark.sim
@pytest.mark.parametrize("family", the_first_quick([*FAMILIES, *MIXTURES, "vit"], quick=1))
def test_any_plan_trains_a_model_of_transformers_as_a_plain_loop_does(family, examples):
    make = image_model if family == "vit" else lambda: language_model(family)
    dataset = images() if family == "vit" else sentences()
    with all_in_fp64():
        # Weights show the scale of a gradient only under SGD.
        for number, optimizer in enumerate((torch.optim.SGD, torch.optim.AdamW)):
            rate = 0.5 if optimizer is torch.optim.SGD else 1e-2
            recipe = recipe_of(
                make,
                dataset=dataset,
                make_optimizer=lambda m, o=optimizer, r=rate: o(m.parameters(), lr=r),
            )
            job = recipe.job()
            wanted = plain_loop(recipe, recipe.model().train())
            assert_close(trained(recipe, job, alone(job)), wanted, "alone")
            for seed in range(number, max(examples // 6, 2), 2):
                plan = any_plan(drawn(seed), job, ranks_max=6)
                assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


class Checkpointed(torch.nn.Module):
    """A block that checkpoints a part of itself, as scripts of a single GPU do."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.2))

    def forward(self, x):
        if self.reentrant is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointed_model(reentrant):
    torch.manual_seed(0)
    blocks = [Checkpointed(reentrant) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Linear(4, 16), *blocks, torch.nn.Linear(16, 1))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_block_is_left_to_the_plan(reentrant):
    rows = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    recipes = [
        recipe_of(
            lambda given=given: checkpointed_model(given),
            dataset=rows,
            loss=lambda out, batch: torch.nn.functional.mse_loss(out, batch[1]),
        )
        for given in (reentrant, None)
    ]
    inside, plain = (recipe.job() for recipe in recipes)
    assert inside.model == plain.model
    plan = any_plan(drawn(1), inside, ranks_max=4)
    assert trained(recipes[0], inside, plan)[0] == trained(recipes[1], plain, plan)[0]


class Widening(torch.nn.Module):
    """A block whose output has another width than its input."""

    def __init__(self, width, out):
        super().__init__()
        self.linear = torch.nn.Linear(width, out)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def test_chunks_hand_on_states_of_different_shapes():
    """What a rank sends has one shape after each of its stages, not one for all of them."""

    def make():
        torch.manual_seed(0)
        widths = [16, 24, 8, 12, 16]
        blocks = [Widening(*pair) for pair in itertools.pairwise(widths)]
        return torch.nn.Sequential(torch.nn.Linear(4, 16), *blocks, torch.nn.Linear(16, 1))

    rows = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    recipe = recipe_of(
        make,
        dataset=rows,
        loss=lambda out, batch: torch.nn.functional.mse_loss(out, batch[1]),
    )
    job = recipe.job()
    assert len(job.model.layers) == 8, "all modules of a sequence are blocks"
    plan = plan_of(1, (4, [(0, 2, 1), (2, 4, 1), (4, 5, 1), (5, 8, 1)]), (4, FOUR_CHUNKS))
    plan = replace(plan, schedule="interleaved", virtual_stages=2)
    found, wanted = trained(recipe, job, plan), trained(recipe, job, alone(job))
    assert_close(found, wanted, "chunks")


FOUR_CHUNKS = [(0, 2, 1), (2, 3, 1), (3, 5, 1), (5, 8, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_dropout_is_the_same_under_any_plan(family):
    with all_in_fp64():
        recipe = recipe_of(lambda: language_model(family, dropout=0.2))
        job = recipe.job()
        wanted = trained(recipe, job, alone(job))
        without = trained(recipe_of(lambda: language_model(family)), job, alone(job))
        assert wanted[0] != pytest.approx(without[0], rel=1e-4)
        for seed in range(2):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


class SlowlyReceived(ThreadTransport):
    """Sends end when they are received, which takes a while."""

    def __init__(self, world, rank, sent, taken):
        super().__init__(world, rank)
        self.sent, self.taken = sent, taken

    def send(self, tensor, *, to):
        super().send(tensor, to=to)
        self.sent.append(len(self.sent) + 1 - len(self.taken))
        return Sending(self.taken, len(self.sent))

    def receive(self, tensor, *, source):
        time.sleep(0.005)
        self.taken.append(source)
        return super().receive(tensor, source=source)


@dataclass
class Sending:
    taken: list[int]
    number: int

    def wait(self):
        """As on a GPU, it does not block the host."""

    def is_done(self):
        return len(self.taken) >= self.number


def test_an_evaluation_sends_a_slower_stage_no_more_than_it_takes(monkeypatch):
    sent, taken = [], []
    monkeypatch.setattr(
        ThreadWorld, "transport", lambda world, rank: SlowlyReceived(world, rank, sent, taken)
    )
    recipe = recipe_of(Hand, call_module=lambda module, batch: module(batch["input_ids"]))
    recipe = replace(recipe, eval_dataset=[*sentences()] * 4)
    job = recipe.job()
    plan = plan_of(1, (8, [(0, 1, 1), (1, len(job.model.layers), 1)]))

    def body(transport):
        rank = RankTrainer(job, plan, transport.rank, transport, recipe.data(), module=recipe)
        rank.evaluate(recipe.evaluation_after(STEPS - 1))
        rank.close()

    run_as_threads(2, body)
    assert len(sent) > 40
    assert max(sent) <= 4, "two tensors, each with its shape"


def test_an_evaluation_before_the_first_step_leaves_dropout_as_it_is():
    """A process that continues where an evaluation is due begins with it."""
    recipe = recipe_of(Hand, call_module=lambda module, batch: module(batch["input_ids"]))
    recipe = replace(recipe, eval_dataset=sentences())
    job = recipe.job()
    losses = []
    for evaluates in (False, True):
        rank = RankTrainer(
            *(job, alone(job), 0, SingleRankTransport(), recipe.data()), module=recipe
        )
        if evaluates:
            rank.evaluate(recipe.evaluation_after(STEPS - 1))
        drawn_before = torch.get_rng_state()
        losses.append([rank.step().loss for _ in range(2)])
        rank.close()
        assert torch.equal(torch.get_rng_state(), drawn_before), "dropout draws by sample"
    assert losses[0] == losses[1]


def padded_to_the_longest(items):
    length = max(int(item["attention_mask"].sum()) for item in items)
    return {key: torch.stack([item[key][:length] for item in items]) for key in items[0]}


@pytest.mark.slow
def test_micro_batches_may_be_of_different_lengths():
    with all_in_fp64():
        recipe = recipe_of(lambda: language_model("llama"), collate=padded_to_the_longest)
        job = recipe.job()
        wanted = plain_loop(recipe, language_model("llama").train())
        for seed in range(4):
            plan = any_plan(drawn(seed), job, ranks_max=6)
            assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


@pytest.mark.slow
def test_dropout_of_attention_does_not_depend_on_the_length_of_a_micro_batch():
    with all_in_fp64():
        recipe = recipe_of(
            lambda: language_model("gpt2", dropout=0.2), collate=padded_to_the_longest
        )
        job = recipe.job()
        wanted = trained(recipe, job, alone(job))
        for seed in range(2):
            plan = any_plan(drawn(seed), job, ranks_max=4)
            assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


def test_shape_of_like_micro_batches_is_sent_once(monkeypatch):
    """Not before each tensor: on a GPU, sender and receiver would wait for each other."""
    shapes, send = [], ThreadTransport.send

    def counted(transport, tensor, *, to):
        shapes.extend([tensor.tolist()] if tensor.dtype == torch.int64 else [])
        return send(transport, tensor, to=to)

    monkeypatch.setattr(ThreadTransport, "send", counted)
    recipe = recipe_of(lambda: language_model("llama"))
    job = recipe.job()
    last = len(job.model.layers)
    trained(recipe, job, plan_of(2, (4, [(0, 2, 1), (2, last, 1)])))
    assert len(shapes) == 1


class Hand(torch.nn.Module):
    """A model whose head is its embedding, and whose blocks drop ever more."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(p))
            for p in (0.0, 0.1, 0.3)
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


@pytest.mark.slow
def test_weights_tied_by_hand_and_rising_dropout_train_alike_under_any_plan():
    def hand():
        torch.manual_seed(1)
        return Hand().double()

    recipe = recipe_of(hand, call_module=lambda module, batch: module(batch["input_ids"]))
    job = recipe.job()
    wanted = trained(recipe, job, alone(job))
    assert wanted[0][0] > wanted[0][-1]
    for seed in range(4):
        plan = any_plan(drawn(seed), job, ranks_max=5)
        assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")
        interleaved = any_interleaved_plan(drawn(seed), job, ranks_max=5)
        if interleaved is not None:
            assert_close(trained(recipe, job, interleaved), wanted, f"{seed}: {interleaved}")


@pytest.mark.slow
def test_a_data_set_that_draws_gives_every_stage_the_same():
    class Masked:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            item = dict(sentences(20)[index])
            item["input_ids"] = torch.where(torch.rand(8) < 0.2, 3, item["input_ids"])
            return item

    recipe = recipe_of(lambda: language_model("llama"), dataset=Masked())
    with all_in_fp64():
        job = recipe.job()
        wanted = trained(recipe, job, alone(job))
        plan = any_plan(drawn(1), job, ranks_max=5)
        assert_close(trained(recipe, job, plan), wanted, str(plan))


@pytest.mark.slow
def test_frozen_parameters_keep_their_value_and_have_no_state():
    def partly_frozen():
        model = language_model("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers.1" in name or "norm" in name
        return model

    with all_in_fp64():
        recipe = recipe_of(partly_frozen)
        job = recipe.job()
        wanted = plain_loop(recipe, partly_frozen().train())
        for seed in range(2):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            found = trained(recipe, job, plan)
            assert_close(found, wanted, f"seed {seed}: {plan}")
            assert not any(
                "embed_tokens" in name or "layers.0.mlp" in name for name in found.weights
            )
    held = sum(layer.parameters() for layer in job.model.layers)
    frozen = sum(layer.frozen_parameters() for layer in job.model.layers)
    assert held + frozen == sum(p.numel() for p in partly_frozen().parameters())


DECAYING = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
}
"""Optimizers whose groups have a ``weight_decay``."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DECAYING))
def test_groups_and_schedules_of_torchs_optimizers_are_honoured(kind):
    def optimizer(module):
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.3},
            {"params": others, "weight_decay": 0.0, "lr": 5e-2},
        ]
        return DECAYING[kind](groups)

    def scheduler(made):
        factors = [lambda step: (step + 1) / 4, lambda step: step / 2]
        return torch.optim.lr_scheduler.LambdaLR(made, factors)

    with all_in_fp64():
        recipe = recipe_of(
            lambda: language_model("llama"), make_optimizer=optimizer, make_scheduler=scheduler
        )
        job = recipe.job()
        wanted = plain_loop(recipe, language_model("llama").train(), scheduler)
        for seed in range(2):
            plan = any_plan(drawn(seed), job, ranks_max=4)
            assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DECAYING))
def test_zero1_updates_groups_as_without_it(kind):
    def optimizer(module):
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0}]
        return DECAYING[kind](groups)

    with all_in_fp64():
        recipe = recipe_of(lambda: language_model("llama"), make_optimizer=optimizer)
        job = recipe.job()
        for seed in range(2):
            plan = any_plan(drawn(seed), job, ranks_max=5)
            wanted = trained(recipe, job, plan)
            found = trained(recipe, replace(job, zero=1), plan)
            assert_close(found, wanted, f"seed {seed}: {plan}", rel=1e-14)


def test_the_most_ranks_that_may_share_a_block_follow_from_its_code():
    expected = {"llama": 2, "qwen3": 2, "phi": 4, "gpt_neox": 4, "gpt2": 1, "phi3": 1}
    for family, most in expected.items():
        splits = recipe_of(lambda family=family: language_model(family)).splits
        assert splits.max_tp == most, family
        assert bool(splits.why_not_more) == (most == 1)


def test_experts_stay_whole_and_the_rest_of_a_block_is_split():
    recipe = recipe_of(lambda: language_model("mixtral"))
    assert recipe.splits.max_tp == 2
    (note,) = recipe.notes()
    assert note.startswith("every rank of a stage computes model.layers.0.mlp.experts in full")


def test_fused_experts_are_described_and_trained_like_plain_ones():
    recipes = [
        recipe_of(lambda e=e: language_model("mixtral", experts=e).float())
        for e in ("eager", "grouped_mm")
    ]
    plain, fused = (recipe.job() for recipe in recipes)
    flops = [[layer.flops for layer in job.model.layers] for job in (plain, fused)]
    assert flops[0] == flops[1]
    plan = any_plan(drawn(2), fused, ranks_max=4)
    losses = trained(recipes[1], fused, plan, formats_of(fused)).losses
    wanted = trained(recipes[0], plain, alone(plain), formats_of(plain)).losses
    assert losses == pytest.approx(wanted, rel=1e-4)


def test_auxiliary_loss_of_a_router_is_refused():
    recipe = recipe_of(lambda: language_model("mixtral", output_router_logits=True))
    with pytest.raises(InputError, match="whose auxiliary loss mixes samples"):
        recipe.job()


def test_dropout_inside_a_part_that_would_be_split_keeps_blocks_whole():
    splits = recipe_of(lambda: language_model("llama", dropout=0.1)).splits
    assert splits.max_tp == 1
    assert "model.layers.0 has dropout inside a part" in splits.why_not_more


class Wide(torch.nn.Module):
    """A block that declares how its class may be split."""

    splits = {"up": "columns", "down": "rows"}  # noqa: RUF012 - as a user would write it

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def of_blocks(make):
    torch.manual_seed(1)
    blocks = [make() for _ in range(3)]
    embedding, head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)
    return torch.nn.Sequential(embedding, torch.nn.Sequential(*blocks), head).double()


@pytest.mark.slow
def test_blocks_whose_class_declares_splits_train_alike_under_any_plan():
    recipe = recipe_of(
        lambda: of_blocks(Wide), call_module=lambda module, batch: module(batch["input_ids"])
    )
    job = recipe.job()
    assert job.max_tp == 8
    wanted = trained(recipe, job, alone(job))
    for seed in range(4):
        plan = any_plan(drawn(seed), job, ranks_max=6)
        assert_close(trained(recipe, job, plan), wanted, f"seed {seed}: {plan}")


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ({"up": "column", "down": "rows"}, "declared as 'column'; columns and rows are possible"),
        ({"upp": "columns", "down": "rows"}, "1.0.upp is declared, and the block has no such part"),
        ({"up": "columns"}, "1.0 does not compute with a share of its columns"),
    ],
)
def test_mistaken_splits_keep_blocks_whole(splits, said):
    mistaken = type("Mistaken", (Wide,), {"splits": splits})
    recipe = recipe_of(
        lambda: of_blocks(mistaken), call_module=lambda module, batch: module(batch["input_ids"])
    )
    assert recipe.splits.max_tp == 1
    assert said in recipe.splits.why_not_more
