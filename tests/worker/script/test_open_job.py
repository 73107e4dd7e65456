"""A script that would train otherwise than the job was described is refused."""

from __future__ import annotations

import pytest

from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from tests.worker.script.test_script_trainer import SCRIPT
from worker.script.job_text import job_text
from worker.script.load import load_script
from worker.script.open_job import check_job, open_saved_module
from worker.script.script_settings import settings_digests


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_gives_another_job_than_was_described_is_refused(script):
    described = load_script(script, ["4"]).job()
    recipe = load_script(script, ["5"])
    with pytest.raises(InputError, match="steps is 5 here, and 4 in the described job"):
        check_job(recipe, described)


@pytest.mark.parametrize(
    ("was", "becomes", "expected"),
    [
        ("batch_size=6,", "batch_size=6, skip_nonfinite=1,", "skip_nonfinite is 1 here, and 3"),
        ("momentum=0.5", "momentum=0.6", "momentum=0.6"),
        ("nn.Linear(8, 3)", "nn.Linear(8, 4)", r"has bias of shape \[4\] \(trained\) here, and of"),
        (
            "\noptimizer =",
            "\nmodel[0].bias.requires_grad_(False)\noptimizer =",
            r"has bias of shape \[8\] \(frozen\) here, and of shape \[8\] \(trained\)",
        ),
    ],
)
def test_a_script_that_differs_in_one_setting_is_refused(script, was, becomes, expected):
    """Machines whose scripts compute other settings would train each with its own."""
    recipe = load_script(script)
    text = job_text(recipe.job(), script)
    job_file = script.with_name("job.toml")
    job_file.write_text(text)
    described = load_job(job_file)
    check_job(recipe, described)
    assert was in SCRIPT
    script.write_text(SCRIPT.replace(was, becomes))
    with pytest.raises(InputError, match=expected):
        check_job(load_script(script), described)


def test_the_checkpoint_of_a_built_in_model_is_exported_without_a_job_file(script, tmp_path):
    described = load_script(script).job()
    with pytest.raises(InputError, match="of a built-in model; leave --job out"):
        open_saved_module(tmp_path / "job.toml", described)


def test_a_checkpoint_is_exported_with_a_script_whose_settings_changed(script):
    described = load_script(script, ["4"]).job()
    assert open_saved_module(script, described, ["5"]).steps == 5


@pytest.mark.parametrize(
    ("was", "becomes", "expected"),
    [
        ("batch_size=6,", "batch_size=6, shuffle=False,", "shuffle"),
        (
            "model.parameters(), lr=0.1",
            "[{'params': model[0].parameters(), 'lr': 0.1}, {'params': model[3].parameters()}],"
            " lr=0.2",
            "parameter groups",
        ),
        (
            'name="small",',
            "scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),",
            "learning rate schedules",
        ),
    ],
)
def test_other_settings_have_other_digests(script, was, becomes, expected):
    found = load_script(script).settings_digests()
    assert load_script(script).settings_digests() == found
    assert was in SCRIPT
    script.write_text(SCRIPT.replace(was, becomes))
    other = load_script(script).settings_digests()
    assert [name for name in found if found[name] != other[name]] == [expected]


def test_another_number_of_samples_to_evaluate_is_another_setting(script):
    """Ranks would wait for each other in the middle of an evaluation."""
    found = []
    for count in (11, 12):
        text = SCRIPT.replace('name="small",', f'name="small", eval_dataset=data[:{count}],')
        script.write_text(text)
        found.append(load_script(script).settings_digests())
    one, other = found
    names = [name for name in one if one[name] != other[name]]
    assert names == ["number of samples to evaluate"]


def test_the_last_digits_of_a_cosine_are_no_difference():
    one, other = [1.0, 5e-12, 0.0], [1.0, 5e-12 + 1e-16, -1e-17]
    assert settings_digests({}, [one]) == settings_digests({}, [other])
    assert settings_digests({}, [one]) != settings_digests({}, [[1.0, 0.5, 0.0]])
