"""What a script has switched off stays off, and what Sailor decides itself is switched off."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sailor
from simulator.documents.problems import InputError
from worker.models.user_module.cut_module import CutModule
from worker.script.prepare_module import switch_to_training, uncompiled
from worker.script.recipe import Recipe


class Pretrained(nn.Sequential):
    """Comes in evaluation, as models of transformers do."""

    @classmethod
    def from_pretrained(cls):
        return cls(nn.Linear(2, 2), nn.Dropout(0.1)).eval()


def in_training(module):
    return [name for name, part in module.named_modules() if part.training]


def test_parts_that_a_script_put_into_evaluation_stay_so():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    module[1].eval()
    module[1][0].train()
    switch_to_training(module)
    assert in_training(module) == ["", "0", "1.0"]


def test_a_whole_module_in_evaluation_trains():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    switch_to_training(module)
    assert in_training(module) == ["", "0", "1"]


def test_a_pretrained_part_stays_in_evaluation_only_if_it_is_frozen():
    trained = nn.Sequential(Pretrained.from_pretrained(), nn.Linear(2, 2))
    switch_to_training(trained)
    assert in_training(trained) == ["", "0", "0.0", "0.1", "1"]
    frozen = nn.Sequential(Pretrained.from_pretrained().requires_grad_(False), nn.Linear(2, 2))
    switch_to_training(frozen)
    assert in_training(frozen) == ["", "1"]


class Wrapper(nn.Module):
    """Holds its module as that of ``torch.compile`` does, whose import takes seconds."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


def test_compiled_parts_are_unwrapped_at_any_depth():
    inner = nn.Linear(2, 2)
    module = nn.Sequential(nn.Sequential(Wrapper(Wrapper(inner))), nn.ReLU())
    names = [name for name, _ in uncompiled(module)[0].named_parameters()]
    assert names == ["0.0.weight", "0.0.bias"]
    assert module[0][0] is inner
    assert uncompiled(module) == (module, False)


def with_compiler(test):
    """Mark a test that imports the compiler."""
    theirs = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    return pytest.mark.slow(pytest.mark.filterwarnings(theirs)(test))


@with_compiler
def test_a_module_that_was_compiled_in_place_computes_by_its_own_code():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].compile()
    assert uncompiled(module) == (module, True)
    assert module[1]._compiled_call_impl is None
    assert module(torch.ones(2)).shape == (2,)


@with_compiler
def test_compiled_module_trains_uncompiled_with_a_note(capsys):
    def trainer(prepare):
        torch.manual_seed(3)
        module = prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
        data = [(torch.arange(4.0) * i, i % 3) for i in range(8)]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return sailor.Trainer(module, data, batch_size=4, steps=2, optimizer=optimizer)

    plain, compiled = trainer(lambda module: module), trainer(torch.compile)
    plain.train()
    assert "note:" not in capsys.readouterr().out
    compiled.train()
    assert capsys.readouterr().out.count("note: model: torch.compile is left out") == 1
    assert any("torch.compile is left out" in note for note in compiled.recipe.notes())
    assert [each.loss for each in compiled.history] == [each.loss for each in plain.history]
    for mine, theirs in zip(
        plain.recipe.model.parameters(), compiled.recipe.model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), "also the wrapper has the trained weights"


def test_a_model_caches_again_after_training():
    """Or the script would save a config by which generating takes long."""
    module, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    module.config = SimpleNamespace(use_cache=True)
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    trainer = sailor.Trainer(
        *(module, data),
        **{"batch_size": 2, "steps": 1},
        callbacks=[lambda *_: seen.append(module.config.use_cache)],
    )
    for _ in range(2):
        trainer.train()
        assert module.config.use_cache
    assert seen == [False, False]


class Extractor(nn.Module):
    """Trains a head on what blocks compute without gradients, as a linear probe does."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("trained", "named"),
    [(["blocks"], r"blocks\.0\.weight"), (["first"], "first.weight"), ([], "")],
)
def test_what_is_called_without_gradients_is_not_trained(trained, named):
    """Ranks call blocks themselves, outside of the code around them."""
    module = Extractor()
    for part in ["first", "blocks"]:
        module.get_submodule(part).requires_grad_(part in trained)
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    trainer = sailor.Trainer(module, data, batch_size=2, steps=1)
    if not trained:
        trainer.train()
        return
    with pytest.raises(InputError, match=f"calls blocks.1 without gradients, and {named} is to be"):
        trainer.train()


class Checkpointing(nn.Sequential):
    """As models of transformers after ``gradient_checkpointing_enable``."""

    gradient_checkpointing = True


def test_gradient_checkpointing_that_is_on_gets_a_note(capsys):
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    module = Checkpointing(nn.Linear(2, 2), nn.Linear(2, 2))
    sailor.Trainer(module, data, batch_size=2, steps=1).train()
    note = "note: model: gradient checkpointing is left to recompute="
    assert capsys.readouterr().out.count(note) == 1


def test_a_lazy_module_is_refused_until_its_sizes_are_known():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    with pytest.raises(InputError, match=r"1\.weight has no size before a first batch"):
        sailor.Trainer(module, data, batch_size=2, steps=1).train()
    module(torch.ones(2))
    sailor.Trainer(module, data, batch_size=2, steps=1).train()


def test_complex_parameters_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.cfloat))
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    with pytest.raises(InputError, match=r"1\.weight is of complex numbers, .*view_as_complex"):
        sailor.Trainer(module, data, batch_size=2, steps=1).train()


class Named(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def test_an_entry_of_samples_that_the_module_does_not_take_is_named_with_the_cure():
    module = Named(nn.Linear(2, 2), nn.Linear(2, 2))
    data = [{"x": torch.ones(2), "path": torch.tensor(0), "labels": 0}] * 2
    with pytest.raises(InputError, match=r"unexpected keyword argument 'path'.*give call="):
        sailor.Trainer(module, data, batch_size=2, steps=1).train()


def test_learnt_prompts_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    with pytest.raises(InputError, match=r"it learns prompts .* cannot be cut"):
        sailor.Trainer(module, data, batch_size=2, steps=1).train()


def test_adapters_with_a_loss_of_their_own_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.peft_config = {"default": SimpleNamespace(peft_type="ADALORA")}
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    with pytest.raises(InputError, match=r"it is adapted by AdaLoRA, .*; use LoraConfig"):
        sailor.Trainer(module, data, batch_size=2, steps=1).train()


class Autocast(Extractor):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.blocks[1](self.blocks[0](self.first(x))))


def test_autocast_around_blocks_is_refused():
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    trainer = sailor.Trainer(Autocast(), data, batch_size=2, steps=1)
    with pytest.raises(InputError, match=r"blocks.0 is called under torch.autocast: give precis"):
        trainer.train()


class Detaching(Extractor):
    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.first(x))).detach())


@pytest.mark.parametrize("trained", [["first"], ["blocks"], []])
def test_what_gets_no_gradient_is_not_trained(trained):
    torch.manual_seed(0)
    module = Detaching()
    for part in ["first", "blocks"]:
        module.get_submodule(part).requires_grad_(part in trained)
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    trainer = sailor.Trainer(module, data, batch_size=2, steps=1)
    if not trained:
        before = module.head.weight.clone()
        trainer.train()
        assert not torch.equal(module.head.weight, before)
        return
    with pytest.raises(InputError, match="head hands no gradient to what is in front of it"):
        trainer.train()


class KeepsFirst(nn.Sequential):
    """Keeps a part in evaluation by a method of its own."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("kind", [nn.Sequential, KeepsFirst])
def test_training_after_an_evaluation_is_as_before(kind):
    module = kind(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    module[1].eval()
    recipe = Recipe(module, [torch.ones(2)], 1, steps=1)
    cut = CutModule(recipe.skeleton(), recipe.cut, recipe.call)
    before = in_training(cut.module)
    assert before == (["", "0"] if kind is nn.Sequential else [""])
    cut.set_training(False)
    assert in_training(cut.module) == []
    cut.set_training(True)
    assert in_training(cut.module) == before


def test_a_module_without_values_is_refused_with_the_name_of_a_parameter():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"0.weight has no values \(device meta\); make the"):
        Recipe(model=module, dataset=[], batch_size=1).job()
