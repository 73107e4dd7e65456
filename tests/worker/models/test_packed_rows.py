"""Documents in a packed row are computed as if each were alone."""

from __future__ import annotations

import pytest
import torch

import sailor
from simulator.documents.problems import InputError
from tests.conftest import the_first_quick
from tests.worker.hf_families import FAMILIES, VOCABULARY, all_in_fp64, language_model
from tests.worker.module_runs import recipe_of, trained
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import alone, drawn
from worker.script.losses import default_loss


def documents(count=60):
    found = []
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, VOCABULARY, (2 + number % 6,), generator=draw)
        found.append({"input_ids": tokens})
    return found


def loss_of_each_alone(recipe, module):
    """Return the mean loss of the documents of the first batch, each in a row of its own."""
    rows, loss = recipe.dataset, default_loss(module)
    total = labels = 0
    data = recipe.data()
    for _, row in data._numbers(0, range(8)):
        for document in rows.documents(row):
            batch = {k: v[None] for k, v in rows.row([document], len(document[0])).items()}
            one, count = loss(recipe.call(module, batch), batch)
            total, labels = total + one.item(), labels + int(count)
    return total / labels


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", the_first_quick((family for family in FAMILIES if family != "opt"), quick=1)
)
def test_the_loss_of_a_row_is_that_of_its_documents(family, attention):
    def model():
        found = language_model(family)
        found.set_attn_implementation(attention)
        return found

    with all_in_fp64():
        recipe = recipe_of(model, dataset=sailor.Packed(documents(), 12))
        job = recipe.job()
        wanted = loss_of_each_alone(recipe, model())
        for plan in (alone(job), any_plan(drawn(family), job, ranks_max=5)):
            losses = trained(recipe, job, plan).losses
            assert losses[0] == pytest.approx(wanted, rel=1e-10)


def test_a_model_that_mixes_documents_is_refused():
    recipe = recipe_of(lambda: language_model("opt"), dataset=sailor.Packed(documents(), 12))
    with pytest.raises(InputError, match="lets documents of a packed row attend to one another"):
        recipe.job()


def test_a_mask_of_the_segments_keeps_documents_apart():
    def call(module, batch):
        segments = batch["segment_ids"]
        same = segments[:, :, None] == segments[:, None, :]
        seen = same & torch.ones_like(same[0]).tril()
        return module(
            batch["input_ids"], attention_mask=seen[:, None], position_ids=batch["position_ids"]
        )

    with all_in_fp64():
        rows = sailor.Packed(documents(), 12, segments=True)
        recipe = recipe_of(lambda: language_model("opt"), dataset=rows, call_module=call)
        job = recipe.job()
        losses = trained(recipe, job, alone(job)).losses
        assert losses[0] == pytest.approx(loss_of_each_alone(recipe, language_model("opt")))
