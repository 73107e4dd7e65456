"""Job files: keys, defaults and mistakes."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.inputs.job_file import job_from_document, load_job
from simulator.models.description_file import describe, inline_description
from simulator.models.presets import preset
from simulator.spec.job import Checkpoint, Data, Job, Objective, UpdateSettings

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads(
    (resources.files("simulator") / "data/schemas/job.schema.json").read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

SMALL: dict[str, Any] = {
    "model": {"preset": "opt-350m"},
    "training": {"global_batch": 64, "sequence": 1024},
}
FULL: dict[str, Any] = {
    "job": {"name": "mine"},
    "model": {"preset": "opt-350m", "profile": "OPT-350"},
    "training": {
        "global_batch": 1024,
        "sequence": 2048,
        "precision": "fp32",
        "optimizer": "adam",
        "recompute": "auto",
        "max_tp": 4,
        "micro_batches": [1, 2, 4],
        "flash_attention": False,
        "zero": 1,
        "gradient_sync": "serial",
        "steps": 1000,
        "learning_rate": 1e-4,
        "schedule": "cosine",
        "warmup_steps": 10,
        "clip_norm": 1.0,
        "learning_rate_min": 1e-5,
        "dropout": 0.1,
        "runtime": "megatron-deepspeed",
    },
    "objective": {
        "goal": "cost",
        "max_usd_per_iteration": 1.2,
        "max_usd_per_hour": 900,
        "max_usd_total": 1e5,
        "min_iterations_per_s": 0.2,
        "deadline": "2030-01-31T12:00:00",
        "max_spot_share": 0.5,
        "allow": ["interleaved"],
    },
    "data": {"kind": "tokens", "tokens": "corpus.bin", "seed": 7},
    "checkpoint": {
        "uri": "file:///tmp/x",
        "memory_every": 5,
        "persist_every": 50,
        "keep": 2,
        "survive": "zone",
    },
}


def read(raw: dict[str, Any]) -> Job:
    document = parse_document(json.dumps(raw).encode(), name="job.json", flaws_raise=False)
    return job_from_document(document)


def read_toml(text: str, *, folder: Path = Path()) -> Job:
    raw = text.encode()
    document = parse_document(raw, name="job.toml", folder=folder, flaws_raise=False)
    return job_from_document(document)


def mistakes(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_toml(text)
    return [str(problem) for problem in caught.value.problems]


def changed(raw: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    new = copy.deepcopy(raw)
    new.setdefault(section, {}).update(values)
    return new


def test_the_example_is_a_job_and_fits_the_schema() -> None:
    job = load_job(ROOT / "examples" / "opt-350m.toml")
    assert job.name == "opt-350m"
    assert len(job.model.layers) == 26
    assert (job.global_batch, job.sequence, job.precision) == (1024, 2048, "fp32")
    assert job.max_tp == 4


def test_omitted_keys_have_the_documented_defaults() -> None:
    assert read(SMALL) == Job(
        name="job", model=preset("opt-350m", dropout=False), global_batch=64, sequence=1024
    )


def test_every_key_is_read() -> None:
    job = read(FULL)
    assert job.objective == Objective(
        goal="cost",
        max_usd_per_iteration=1.2,
        max_usd_per_hour=900.0,
        max_usd_total=1e5,
        min_iterations_per_s=0.2,
        deadline="2030-01-31T12:00:00+00:00",
        max_spot_share=0.5,
        allow=("interleaved",),
    )
    assert job.data == Data(kind="tokens", seed=7, tokens="corpus.bin")
    assert job.checkpoint == Checkpoint("file:///tmp/x", 5, 50, 2, "zone")
    said = FULL["training"]
    assert {key: getattr(job, key) for key in said} == {**said, "micro_batches": (1, 2, 4)}
    assert (job.name, job.profile) == ("mine", "OPT-350")


def test_the_optimizers_constants_are_read() -> None:
    given = {"betas": [0, 0.95], "epsilon": 1e-6, "weight_decay": 0.1, "momentum": 0.5}
    given |= {"nesterov": True}
    raw = copy.deepcopy(SMALL)
    raw["training"] |= given
    assert read(raw).update == UpdateSettings((0.0, 0.95), 1e-6, 0.1, 0.5, True)
    raw["training"]["betas"] = [0.9, 1]
    with pytest.raises(InputError, match="give two numbers below 1"):
        read(raw)


def test_a_scripts_model_may_stand_in_the_job_itself() -> None:
    model = preset("gpt2")
    text = inline_description(model)
    assert len(text) < len(json.dumps(describe(model))) / 4
    raw = {**SMALL, "model": {"script": "train.py", "description": text}}
    assert (read(raw).model, read(raw).script) == (model, "train.py")
    VALIDATOR.validate(raw)
    raw["model"] = {"script": "train.py"}
    with pytest.raises(InputError, match="script: is given without a description"):
        read(raw)
    unknown = text.replace('"like":"block 1"', '"like":"block 77"')
    raw["model"] = {"description": unknown}
    with pytest.raises(InputError, match="is 'block 77', which is not an earlier layer"):
        read(raw)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("5", "layers: is 5; give a list"),
        ('"embedding"', "layers: is 'embedding'; give a list"),
        ('[{"name": ["a"]}]', r"layers\[0\].name: is \['a'\]; give a text"),
        ('[{"name": "a", "like": ["a"]}]', r"is \['a'\], which is not an earlier layer"),
        ('[{"name": {}}, {"name": "b", "like": {}}]', r"is \{\}, which is not an earlier layer"),
    ],
)
def test_wrong_layers_in_the_job_itself_are_mistakes(layers: str, told: str) -> None:
    text = f'{{"format": "sailor-model-1", "layers": {layers}}}'
    with pytest.raises(InputError, match=told):
        read({**SMALL, "model": {"description": text}})


def test_training_settings_change_the_model() -> None:
    plain = read(SMALL).model
    assert read(changed(SMALL, "training", dropout=0.1)).model != plain
    megatron = read(changed(SMALL, "training", runtime="megatron-deepspeed")).model
    assert megatron.vocab % 128 == 0
    assert plain.vocab % 128 != 0


def test_toml_date_equals_its_iso_text() -> None:
    start = '[model]\npreset = "gpt2"\n[training]\nglobal_batch = 8\nsequence = 8\n[objective]\n'
    inline = read_toml(f"{start}deadline = 2030-01-31T12:00:00+01:00")
    quoted = read_toml(f'{start}deadline = "2030-01-31T12:00:00+01:00"')
    assert inline.objective.deadline == quoted.objective.deadline == "2030-01-31T12:00:00+01:00"


def test_family_has_as_many_positions_as_the_job_needs() -> None:
    numbers = {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4}
    assert read({**SMALL, "model": numbers}).model.sequence_max == 1024
    longer = changed({**SMALL, "model": numbers}, "training", sequence=4096)
    assert read(longer).model.sequence_max == 4096
    with pytest.raises(InputError, match="positions for 512 tokens only; give at most 512"):
        read({**SMALL, "model": {**numbers, "sequence": 512}})


def test_family_section_is_read() -> None:
    numbers = {"layers": 6, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 256}
    job = read({**SMALL, "model": {"family": "llama", **numbers}})
    assert (job.model.family, len(job.model.layers), job.model.kv_heads) == ("llama", 8, 2)


def test_model_file_is_relative_to_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(describe(preset("opt-125m"))))
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    rest = "[training]\nglobal_batch = 8\nsequence = 64\n"
    described = read_toml(f'[model]\ndescription = "model.json"\n{rest}', folder=tmp_path)
    assert described.model == preset("opt-125m")
    assert described.weights is None
    begun = read_toml(f'[model]\npreset = "gpt2"\nweights = "gpt2"\n{rest}', folder=tmp_path)
    assert begun.weights == "gpt2"
    configured = read_toml(f'[model]\nhf_config = "config.json"\n{rest}', folder=tmp_path)
    assert len(configured.model.layers) == 4


def test_mistakes_in_a_model_file_name_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt3"}')
    with pytest.raises(InputError) as caught:
        read_toml('[model]\nhf_config = "config.json"\n', folder=tmp_path)
    places = [problem.place for problem in caught.value.problems]
    assert "job.toml: [model] hf_config: model_type" in places
    assert "job.toml: [training] global_batch" in places


def test_all_mistakes_are_reported_with_place_and_cure() -> None:
    text = """
        name = "here?"
        [model]
        preset = "opt-35m"
        [training]
        globl_batch = 1024
        sequence = -1
        precision = "fp8"
        optimizer = "adamw"
        max_tp = 0
        dropout = 1.0
        zero = 3
        learning_rate = nan
        micro_batches = [1, 0, "2"]
        [objective]
        goal = "speed"
        max_usd_per_hour = -3
        deadline = "soon"
        max_spot_share = 1.5
        allow = ["interleaved", "zero-bubble"]
        [data]
        kind = "tokens"
        [checkpoint]
        memory_every = "often"
        survive = "rack"
    """
    assert mistakes(text) == [
        "job.toml: [training] learning_rate: is NaN; give a finite number",
        "job.toml: [training] global_batch: is missing; give a positive whole number",
        "job.toml: [training] micro_batches[1]: is 0; give a positive whole number",
        'job.toml: [training] micro_batches[2]: is "2"; give a positive whole number',
        "job.toml: [training] sequence: is -1; give a positive whole number",
        'job.toml: [training] precision: is "fp8"; give "fp32" or "bf16" or "fp16"',
        "job.toml: [training] max_tp: is 0; give a positive whole number",
        "job.toml: [training] zero: is 3; give 0 or 1; ZeRO stages 2 and 3 are not supported",
        "job.toml: [training] dropout: is 1.0; give a number at least 0 and below 1",
        'job.toml: [model] preset: there is no model preset "opt-35m"; '
        'did you mean "opt-350m" or "opt-125m" or "opt-30b"?',
        'job.toml: [training]: has an unknown key "globl_batch"; '
        'did you mean "global_batch" or "micro_batches"?',
        'job.toml: [objective] goal: is "speed"; give "throughput" or "cost"',
        "job.toml: [objective] max_usd_per_hour: is -3; give a number above 0",
        'job.toml: [objective] deadline: is "soon"; '
        "give a date and time such as 2030-01-31T12:00:00Z",
        "job.toml: [objective] max_spot_share: is 1.5; give a number at least 0 and at most 1",
        'job.toml: [objective] allow[1]: is "zero-bubble"; give "interleaved" or "sequence"'
        ' or "micro-batch-per-pipeline"',
        'job.toml: [data] tokens: is missing, and kind is "tokens"; name the file of tokens',
        'job.toml: [checkpoint] memory_every: is "often"; give a number of steps or "auto"',
        'job.toml: [checkpoint] survive: is "rack"; give "node" or "zone"',
        'job.toml: has an unknown key "name"; '
        "choose from checkpoint, data, job, model, objective, training, work",
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "names no model"),
        ({"preset": "gpt2", "family": "opt"}, "has preset and family; keep one of them"),
        ({"layers": 3}, "has numbers without a family"),
        ({"preset": "gpt2", "layers": 3}, "has layers together with preset"),
        ({"family": "lama"}, 'did you mean "llama"?'),
        ({"family": "llama", "layers": 2, "hidden": 64}, "heads: is missing"),
        ({"family": "llama", "layers": 2, "hidden": 64, "heads": 7}, "heads: 7 heads do not"),
        ({"family": "llama", "layers": 10**9, "hidden": 8, "heads": 1}, "from 1 to 10,000"),
        ({"preset": "gpt2", "dropout": 0.1}, "dropout: does not belong in [model]"),
        (
            {"factory": "mine:layers", "description": "x"},
            "as one module in a script",
        ),
        ({"hf_config": "nowhere.json"}, "nowhere.json: there is no file"),
        ({"description": ""}, 'description: is ""; give a text'),
        ({"preset": "gpt2", "profil": "x"}, 'did you mean "profile"?'),
    ],
)
def test_invalid_model_section_is_reported(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read({**SMALL, "model": model})
    assert said in str(caught.value)
    assert not VALIDATOR.is_valid({**SMALL, "model": model}) or model.keys() & {
        "hf_config",  # whether a file exists,
        "family",  # what a family's name is and whether its numbers fit
    }


def test_tp_degree_that_does_not_divide_is_reported_with_possible_ones() -> None:
    with pytest.raises(InputError) as caught:
        read(changed(SMALL, "training", max_tp=3))
    (problem,) = caught.value.problems
    assert problem.place == "job.json: training.max_tp"
    assert problem.what == "TP 3 does not divide the 16 attention heads of opt-350m"
    assert problem.cure == "possible TP degrees: 1, 2, 4, 8, 16"


def test_micro_batches_must_be_able_to_meet_the_global_batch() -> None:
    with pytest.raises(InputError, match="no size that divides the global batch of 64"):
        read(changed(SMALL, "training", micro_batches=[3, 5]))
    assert read(changed(SMALL, "training", micro_batches=[3, 4])).micro_batches == (3, 4)


def test_data_kind_defaults_to_tokens_if_tokens_are_given() -> None:
    assert read(changed(SMALL, "data", tokens="a.bin")).data == Data("tokens", 0, "a.bin")
    with pytest.raises(InputError, match='is "synthetic", but tokens is given'):
        read(changed(SMALL, "data", tokens="a.bin", kind="synthetic"))


def test_schema_accepts_what_the_reader_accepts() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for raw in (SMALL, FULL):
        VALIDATOR.validate(raw)


def test_schema_defaults_match_the_reader() -> None:
    job = read(SMALL)
    sections = {
        "training": job,
        "objective": job.objective,
        "data": job.data,
        "checkpoint": job.checkpoint,
    }
    for section, holder in sections.items():
        for key, rule in SCHEMA["properties"][section]["properties"].items():
            if section == "training" and hasattr(job.update, key):
                wanted = rule.get("default")
                found = getattr(job.update, key)
                assert found == (tuple(wanted) if isinstance(wanted, list) else wanted), key
            elif "default" in rule:
                assert rule["default"] == getattr(holder, key), key
            elif key not in ("global_batch", "sequence", "kind", "mounts", "softmax"):
                assert getattr(holder, key) in (None, ()), key


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["auto", "fp32", "full", "adam", "tokens", "cost", "cosine", "sailor"]),
    st.lists(st.integers(-1, 4), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a job with one to three values replaced, removed or added."""
    raw: dict[str, Any] = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from(sorted(raw) or ["model"]))
        inner = raw.get(section)
        if not isinstance(inner, dict) or draw(st.integers(0, 9)) == 0:
            raw[section] = draw(VALUES)
            continue
        keys = [*sorted(inner), draw(st.text(max_size=4))]
        key = draw(st.sampled_from(keys))
        if draw(st.booleans()):
            inner.pop(key, None)
        else:
            inner[key] = draw(VALUES)
    return raw


@pytest.mark.slow
@pytest.mark.chaos
@given(damaged())
def test_damaged_job_is_read_or_rejected(raw: dict[str, Any]) -> None:
    try:
        read(raw)
    except InputError as error:
        str(error).encode()
    else:
        VALIDATOR.validate(raw)


SOUND = st.fixed_dictionaries(
    {
        "model": st.just({"preset": "gpt2"}),
        "training": st.fixed_dictionaries(
            {"global_batch": st.integers(1, 4096), "sequence": st.integers(1, 1024)},
            optional={
                "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
                "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
                "recompute": st.sampled_from(["none", "full", "auto"]),
                "max_tp": st.sampled_from([1, 2, 3, 4, 6, 12]),
                "zero": st.sampled_from([0, 1]),
                "steps": st.integers(1, 10**9),
                "learning_rate": st.floats(1e-9, 10),
                "dropout": st.floats(0, 0.99),
                "clip_norm": st.floats(1e-3, 1e3),
            },
        ),
    },
    optional={
        "objective": st.fixed_dictionaries(
            {},
            optional={
                "goal": st.sampled_from(["throughput", "cost"]),
                "max_usd_per_hour": st.floats(0.01, 1e6),
                "max_spot_share": st.floats(0, 1),
                "allow": st.sampled_from([["interleaved"], ["sequence", "interleaved"]]),
            },
        ),
        "checkpoint": st.fixed_dictionaries(
            {}, optional={"memory_every": st.one_of(st.just("auto"), st.integers(1, 100))}
        ),
    },
)


@given(SOUND)
def test_schema_conforming_file_is_a_job(raw: dict[str, Any]) -> None:
    VALIDATOR.validate(raw)
    job = read(raw)
    assert job.global_batch == raw["training"]["global_batch"]
    assert job.objective.goal == raw.get("objective", {}).get("goal", "throughput")


def test_data_kind_defaults_to_images_if_images_are_given() -> None:
    given = read(changed(SMALL, "data", images="a.npy", labels="b.npy")).data
    assert given == Data("images", 0, images="a.npy", labels="b.npy")
    for wrong, told in (
        ({"images": "a", "tokens": "b"}, "is given together with images"),
        ({"kind": "images"}, 'is missing, and kind is "images"'),
        ({"labels": "a"}, "is given without images"),
        ({"kind": "images", "tokens": "a"}, 'is "images", but tokens is given'),
    ):
        with pytest.raises(InputError, match=told):
            read(changed(SMALL, "data", **wrong))


def test_work_needs_a_script_and_mounts_are_checked() -> None:
    small = '[model]\npreset = "opt-125m"\n[training]\nglobal_batch = 4\nsequence = 8\n'
    package = f"{'0' * 64}-1"
    assert mistakes(f'{small}[work]\npackage = "{package}"\n') == [
        'job.toml: work: is given without a script; name it under [model]: script = "..."'
    ]
    assert mistakes(f'{small}[data]\nmounts = {{data = "mnt"}}\n') == [
        'job.toml: [data] mounts: has "data" at "mnt"; give an absolute path on the nodes, or an '
        "address such as gs://bucket/folder"
    ]
    wrong = '[data]\nmounts = {data = 1}\n[work]\npackage = "x"\nsetup = "make"\nsecrets = ["1"]\n'
    found = mistakes(f"{small}{wrong}")
    assert [each.partition(";")[0] for each in found][:4] == [
        'job.toml: [data] mounts: has "data" at 1',
        'job.toml: [work] package: is "x"',
        'job.toml: [work] setup: is "make"',
        'job.toml: [work] secrets: contains "1"',
    ]
    for name in ("PATH", "LD_PRELOAD", "PYTHONPATH", "BASH_ENV"):
        said = mistakes(f'{small}[work]\npackage = "{package}"\nsecrets = ["{name}"]\n')
        assert f'contains "{name}", which changes how programs run' in "".join(said)
    nested = f'[data.mounts]\na = "/x"\n"a/./b" = "/y"\n[work]\npackage = "{package}"\n'
    assert 'has "a/./b" below "a"' in "".join(mistakes(f"{small}{nested}"))
