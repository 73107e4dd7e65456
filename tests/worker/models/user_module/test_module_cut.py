"""A user's module is cut at its blocks, and its parts compute what the whole does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.worker.hf_families import FAMILIES, image_model, language_model, sentences
from tests.worker.module_runs import gradients_of
from worker.data.datasets.map_dataset import default_collate
from worker.models.user_module.cut_module import CutModule
from worker.models.user_module.module_cut import CutError, find_cut, kinds_of


def call(module, batch):
    """Call a module with a mapping's values by name, labels aside, or with a tensor."""
    if isinstance(batch, dict):
        named = {key: value for key, value in batch.items() if key != "labels"}
        return module(**named, use_cache=False).logits
    out = module(batch)
    return getattr(out, "logits", out)


def compute_in_parts(module, batch):
    """Compute a module layer by layer, each with a graph of its own; leave gradients."""
    cut = find_cut(module, call, batch)
    parts = CutModule(module, cut, call)
    arguments = parts.arguments(batch)
    passes = [(None, parts.embed(batch))]
    for index in range(len(cut.blocks)):
        x = passes[-1][1].detach().requires_grad_()
        passes.append((x, parts.block(index, x, arguments)))
    x = passes[-1][1].detach().requires_grad_()
    out = parts.head(x, batch)
    out.pow(2).mean().backward()
    gradient = x.grad
    for x, y in reversed(passes):
        if y.requires_grad:
            y.backward(gradient)
        gradient = None if x is None else x.grad
    return cut, out


@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
def test_parts_compute_bit_for_bit_what_the_whole_module_does(family):
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=draw)
    batch = images if family == "vit" else default_collate(sentences(2))
    module = image_model() if family == "vit" else language_model(family)
    out = call(module, batch)
    out.pow(2).mean().backward()
    wanted = gradients_of(module)
    module.zero_grad()
    cut, found = compute_in_parts(module, batch)
    assert len(cut.blocks) == 3
    assert torch.equal(found, out)
    assert gradients_of(module).keys() == wanted.keys()
    for name, gradient in gradients_of(module).items():
        assert torch.equal(gradient, wanted[name]), name


def test_each_parameter_belongs_to_one_layer():
    cut = find_cut(language_model("qwen2"), call, default_collate(sentences(1)))
    assert cut.alias_of == {"lm_head.weight": "model.embed_tokens.weight"}
    assert cut.layer_of["model.embed_tokens.weight"] == 0
    assert cut.layer_of["model.layers.1.mlp.up_proj.weight"] == 2
    assert cut.layer_of["model.norm.weight"] == 4
    assert not cut.unused


def test_a_plain_chain_is_cut_between_all_its_children():
    chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    cut, out = compute_in_parts(chain, torch.ones(2, 4))
    assert cut.blocks == ("0", "1", "2")
    assert out.shape == (2, 3)


class Blocks(nn.Module):
    """Three blocks, used by a function."""

    def __init__(self, use, *, shared=False):
        super().__init__()
        first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(first if shared else nn.Linear(4, 4) for _ in range(3))
        self.extra = nn.Parameter(torch.ones(4))
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def residual(self, x):
    for block in self.blocks:
        x = x + block(x)
    return x


def backwards(self, x):
    for block in reversed(self.blocks):
        x = block(x)
    return x


def chained(self, x):
    for block in self.blocks:
        x = block(x)
    return x


class InPlace(nn.Linear):
    def forward(self, x):
        x += super().forward(x)
        return x


def of_blocks_in_place():
    module = Blocks(chained)
    module.blocks = nn.ModuleList(InPlace(4, 4) for _ in range(3))
    return module


def without_the_last(self, x):
    return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Blocks(residual), "code between blocks.0 and blocks.1 changes the hidden state"),
        (Blocks(backwards), "blocks.2 is called before blocks.0"),
        (Blocks(without_the_last), "blocks.2 is not called"),
        (Blocks(chained, shared=True), "blocks.0 is called again"),
        (of_blocks_in_place(), "blocks.0 writes into its input: let it make a new one"),
        (nn.Linear(4, 4), "Linear has no list of blocks"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_cut_is_refused_with_the_block_and_the_reason(module, reason):
    with pytest.raises(CutError, match=reason):
        find_cut(module, call, torch.ones(2, 4))


def test_a_parameter_that_no_code_uses_is_known_as_unused():
    cut = find_cut(Blocks(chained), call, torch.ones(2, 4))
    assert cut.unused == {"extra"}


class Pooled(nn.Module):
    """Computes more than it returns, before its blocks and behind them."""

    def __init__(self):
        super().__init__()
        self.first, self.seen = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.pooler, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        self.seen(x)
        x = self.blocks(self.first(x))
        pooled = self.pooler(x)
        return (self.head(x), pooled)[:1]


def test_a_parameter_that_no_result_depends_on_is_known_as_unused():
    """Torch gives it no gradient; one of zeros would still let it decay."""
    cut = find_cut(Pooled(), call, torch.ones(2, 4))
    assert cut.unused == {"seen.weight", "seen.bias", "pooler.weight", "pooler.bias"}


class Chosen(nn.Module):
    """A block whose numbers say which of its layers computes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.layers[int(bool((x.mean() + self.layers[0].bias[0]) > 1))](x)


def test_what_a_block_does_not_use_in_one_pass_may_be_used_in_another():
    chain = nn.Sequential(nn.Linear(4, 4), Chosen(), Chosen(), nn.Linear(4, 3))
    assert not find_cut(chain, call, torch.zeros(2, 4)).unused


class Ends(nn.Module):
    """Layers before and behind three blocks, used by a function."""

    def __init__(self, use):
        super().__init__()
        self.token = nn.Embedding(8, 4)
        self.side = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Sided() for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)
        self.use = use

    def forward(self, tokens):
        return self.use(self, self.token(tokens))


class Sided(nn.Module):
    """A block that takes a second tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.side = nn.Linear(4, 4), 0.0

    def forward(self, x, side=None):
        side = self.side if side is None else getattr(side, "value", side)
        return x + self.linear(x + side)


def blocks_of(self, x, *side):
    for block in self.blocks:
        x = block(x, *side)
    return x


def fresh_sides(self, x):
    for block in self.blocks:
        x = block(x, x.mean(-1, keepdim=True))
    return x


@dataclass
class Context:
    """What scripts pass to their blocks, or return."""

    value: torch.Tensor


class Kept:
    """Parts of a computation, kept by code of its own."""

    def __init__(self, value):
        self.value = value


def by_attribute(self, x):
    for block in self.blocks:
        block.side = self.side(x)
    return blocks_of(self, x)


def of_the_first_block(self, x):
    x = first = self.blocks[0](x)
    for block in self.blocks[1:]:
        x = block(x)
    return self.head(x + first)


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda self, x: blocks_of(self, x, self.side(x)), "takes a second tensor that is trained"),
        (fresh_sides, "takes a second tensor that is trained"),
        (
            lambda self, x: self.head(blocks_of(self, x) + x),
            "code behind blocks.2 uses what was computed from token.weight",
        ),
        (
            lambda self, x: blocks_of(self, x, Context(self.side(x))),
            "takes a second tensor that is trained",
        ),
        (
            lambda self, x: blocks_of(self, x, Kept(self.side(x))),
            "blocks.0 uses what was computed from token.weight beside its hidden state",
        ),
        (by_attribute, "blocks.0 uses what was computed from token.weight beside its hidden state"),
        (
            lambda self, x: Context(self.head(blocks_of(self, x) + x)),
            "code behind blocks.2 uses what was computed from token.weight",
        ),
        (of_the_first_block, "code behind blocks.2 uses what was computed from blocks.0.linear.w"),
    ],
    ids=[
        *("conditioning", "of the hidden state", "skip", "dataclass", "object", "attribute"),
        *("skip to a dataclass", "skip from a block"),
    ],
)
def test_a_second_path_to_a_block_or_the_result_is_refused(use, reason):
    with pytest.raises(CutError, match=reason):
        find_cut(Ends(use), lambda module, batch: module(batch), TOKENS)


@pytest.mark.parametrize(
    "use",
    [
        lambda self, x: nn.functional.linear(blocks_of(self, x), self.token.weight),
        lambda self, x: blocks_of(self, x) @ self.token.weight.T,
    ],
)
def test_a_parameter_used_at_both_ends_is_tied_without_a_second_name(use):
    cut = find_cut(Ends(use), lambda module, batch: module(batch), TOKENS)
    assert cut.alias_of == {"token.weight": "token.weight"}
    assert cut.unused == {"side.weight", "side.bias", "head.weight"}


def test_blocks_that_return_tuples_are_known_before_they_are_computed():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    def chained_pairs(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x

    module = Blocks(chained_pairs)
    module.blocks = nn.ModuleList(Pair(4, 4) for _ in range(3))
    cut, out = compute_in_parts(module, torch.ones(2, 4))
    assert cut.forms == ((None,),) * 3
    assert out.shape == (2, 4)


class Scoring(nn.Linear):
    """A block that returns what it has seen, too, and looks at what the one before has seen."""

    def forward(self, x, seen=None):
        out = super().forward(x)
        return (out if seen is None else out * seen.value), Context(x)


def passed_on(self, x):
    found = []
    for block in self.blocks:
        x, seen = block(x)
        found.append(seen)
    return x, found


def added(self, x):
    for block in self.blocks:
        x, seen = block(x)
    return x + seen.value


def handed_on(self, x):
    seen = None
    for block in self.blocks:
        x, seen = block(x, seen)
    return x


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (passed_on, ""),
        (added, r"code uses a second tensor that blocks\.0 returns"),
        (handed_on, r"blocks\.1 takes a second tensor that the block before it returns"),
    ],
)
def test_a_second_tensor_that_a_block_returns_may_be_passed_on_alone(use, reason):
    module = Blocks(use)
    module.blocks = nn.ModuleList(Scoring(4, 4) for _ in range(3))
    if reason:
        with pytest.raises(CutError, match=reason):
            find_cut(module, call, torch.ones(2, 4))
        return
    cut = find_cut(module, lambda part, batch: call(part, batch)[0], torch.ones(2, 4))
    assert len(cut.blocks) == 3


def test_blocks_of_other_settings_or_without_parameters_are_not_taken_for_equal():
    chain = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2, 3),
    )  # fmt: skip
    _, out = compute_in_parts(chain, torch.ones(2, 1, 8, 8))
    assert out.shape == (2, 3)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for p in (0.0, 0.2, 0.2))
    assert kinds_of(blocks, ["0", "1", "2"]) == [0, 1, 1]
