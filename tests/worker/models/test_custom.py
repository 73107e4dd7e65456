"""Custom layers: split as declared, equal under every TP degree, and checked for problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from simulator.documents.problems import InputError
from simulator.models.layers import Layer, Model, Moment, Term
from simulator.spec.job import Job
from tests.worker import custom_model
from tests.worker.models.test_apply_plan import assert_equal_passes
from tests.worker.tiny_models import layers_of, together
from worker.models.apply_plan import build_layer
from worker.models.custom import check_factory, custom_layer, described_tensors
from worker.models.microbatch_context import MicroBatchContext

pytestmark = pytest.mark.torch
TERM = (Term("all", per_token=1),)


def described(name: str) -> Model:
    """Return the model's description, with arbitrary costs."""
    kinds = ("embedding", "block", "block", "head")
    return Model(
        name="own",
        family="described",
        layers=tuple(
            Layer(
                name=f"layer {index}",
                kind=kind,  # type: ignore[arg-type]  # one of the kinds, as written above
                tensors=described_tensors(layer, first="layer 0"),
                flops=TERM,
                kept=TERM,
                checkpoint=TERM,
                moments=(Moment("all", TERM),),
                traffic=TERM,
                output_per_token=custom_model.WIDTH,
                allreduces_forward=1,
                allreduces_backward=1,
                allreduce_per_token=custom_model.WIDTH,
            )
            for index, (kind, layer) in enumerate(zip(kinds, made(name), strict=True))
        ),
        hidden=custom_model.WIDTH,
        heads=custom_model.HEADS,
        kv_heads=custom_model.KV_HEADS,
        ffn=24,
        vocab=custom_model.WORDS,
        sequence_max=64,
        learned_positions=False,
        tied=True,
    )


def made(name: str) -> list[Any]:
    entries = getattr(custom_model, name)()
    return [each if isinstance(each, torch.nn.Module) else each() for each in entries]


def job_of(name: str, *, like: str = "layers", **training: Any) -> Job:
    """Return a job with this factory and the description of another one."""
    factory = f"{custom_model.__name__}:{name}"
    fixed = {"global_batch": 8, "sequence": 6, "max_tp": 4}
    return Job(name="own", model=described(like), factory=factory, **{**fixed, **training})


@pytest.mark.parametrize("name", ["layers", "recipes"])
@pytest.mark.parametrize(("tp", "atoms"), [(2, 2), (2, 4), (4, 4)])
def test_tp_ranks_compute_what_one_rank_computes(name: str, tp: int, atoms: int) -> None:
    job = job_of(name, max_tp=atoms)
    check_factory(job)
    assert_equal_passes(together(job, tp), together(job, 1))


@pytest.mark.parametrize("name", ["layers", "recipes"])
def test_weights_follow_the_users_code_and_the_seed(name: str) -> None:
    job = job_of(name)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = [p.clone() for i in range(4) for p in custom_layer(job, i).parameters()]
    again = [p for i in range(4) for p in custom_layer(job, i).parameters()]
    assert all(map(torch.equal, one, again))
    assert torch.equal(torch.get_rng_state(), state), "the user's own random numbers moved"
    other = custom_layer(replace(job, data=replace(job.data, seed=9)), 0)
    assert not torch.equal(other.table.weight, one[0])
    held = layers_of(job, tp=1, index=0, group=None)
    assert torch.equal(held[0].tensors[0].parameter[:19], one[0].double())
    assert not held[0].tensors[0].parameter[19:].any()


@pytest.mark.parametrize("name", ["layers", "recipes"])
def test_tied_head_on_another_rank_starts_equal_to_the_embedding(name: str) -> None:
    job = job_of(name)
    first, last = (
        build_layer(
            job,
            index,
            tp=1,
            tp_index=0,
            group=None,
            context=MicroBatchContext(),
            dtype=torch.float32,
            device="cpu",
        )
        for index in (0, 3)
    )
    assert torch.equal(first.tensors[0].parameter, last.tensors[0].parameter)


def problems_of(job: Job) -> list[str]:
    with pytest.raises(InputError) as caught:
        check_factory(job)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "returned list [], not a list of layers"),
        ("missing", "cannot be imported"),
        ("broken", "failed (ValueError: no such file)"),
        ("WORDS", "failed (TypeError: 'int' object is not callable)"),
    ],
)
def test_factory_without_layers_is_refused(name: str, said: str) -> None:
    (found,) = problems_of(job_of(name))
    assert said in found


def test_missing_module_is_reported() -> None:
    job = replace(job_of("layers"), factory="no_such_module:layers")
    (found,) = problems_of(job)
    assert "No module named 'no_such_module'" in found


def test_all_entries_that_are_not_layers_are_reported() -> None:
    found = problems_of(job_of("numbers"))
    assert ["as layer 2" in found[0], "as layer 3" in found[1], len(found)] == [True, True, 2]


def test_layers_that_do_not_chain_are_reported() -> None:
    (found,) = problems_of(job_of("unchained", like="unchained"))
    assert found.startswith(
        "model.factory: layer 2: does not take what layer 1 returns, 1 x 6 x 16"
    )
    (found,) = problems_of(job_of("headless", like="headless"))
    assert "layer 3: returns 1 x 6 x 16, not logits of 1 x 6 x 19" in found
    (found,) = problems_of(job_of("several"))
    assert "layer 1: returns tuple" in found


def test_layers_that_differ_from_the_description_are_reported() -> None:
    found = problems_of(job_of("layers", like="unchained"))
    assert len(found) == 16
    assert found[0] == (
        "model.factory: layer 2: bias is not as described; "
        "describe the model again with `sailorctl profile model`"
    )
    short = job_of("layers")
    short = replace(short, model=replace(short.model, layers=short.model.layers[1:]))
    assert "makes 4 layers, the description has 3" in problems_of(short)[0]


def test_impossible_splits_are_reported() -> None:
    found = problems_of(job_of("odd", like="odd"))
    assert "up has the unknown split kind 'shards'" in found[0]
    assert "norm is a LayerNorm; columns needs nn.Linear" in found[1]
    found = problems_of(job_of("layers", max_tp=3))
    assert "query.weight has 4 pieces, not divisible by TP degree 3" in found[0]


def test_undeclared_shared_parameters_are_reported() -> None:
    (found,) = problems_of(job_of("sharing", like="sharing"))
    assert "project.weight is also a parameter of layer 0" in found
