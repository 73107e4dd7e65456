"""Image recipes: their shell is valid, what they name exists, and pins are the project's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "images"
PIP = """#!/bin/sh
echo "$@" >> "$LOG"
"""


def install(tmp_path: Path, *wheels: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a Python that notes what it was asked, and /opt below a folder."""
    (tmp_path / "built").mkdir()
    for name in (*wheels, "constraints.txt"):
        (tmp_path / "built" / name).touch()
    fake = tmp_path / "opt/sailor/bin"
    fake.mkdir(parents=True)
    for name in ("python", "sailor-agent", "python3.12"):
        (fake / name).write_text(PIP)
        (fake / name).chmod(0o755)
    text = (IMAGES / "install.sh").read_text().replace("/opt/", f"{tmp_path}/opt/")
    return subprocess.run(
        ["bash", "-c", text, "install.sh", str(tmp_path / "built"), "peft"],
        env={**os.environ, "PYTHON": str(fake / "python3.12"), "LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_install_script_installs_torch_then_the_wheel_with_the_projects_pins(tmp_path):
    done = install(tmp_path, "sailor-0.1.0-py3-none-any.whl")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "log").read_text().replace(str(tmp_path), "").splitlines()
    assert asked[0] == "-m venv /opt/sailor"
    torch, wheel = (line for line in asked if " install " in line)
    assert torch.endswith("--constraint /built/constraints.txt torch numpy safetensors")
    assert wheel.endswith("/built/sailor-0.1.0-py3-none-any.whl[worker] gcsfs peft")


@pytest.mark.parametrize("wheels", [(), ("sailor-1.whl", "sailor-2.whl")])
def test_the_install_script_wants_one_wheel(tmp_path, wheels):
    done = install(tmp_path, *wheels)
    assert done.returncode == 1
    assert "must hold one wheel" in done.stderr


def test_what_the_recipes_copy_exists_or_is_built_as_they_say():
    container = (IMAGES / "Containerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(\S+)", container, re.MULTILINE)
    assert copied == ["install.sh", "built"]
    packer = (IMAGES / "gce.pkr.hcl").read_text()
    assert re.findall(r'"\$\{path\.root\}/(\S+)"', packer) == ["built", "install.sh"]
    for text in (container, packer):
        assert "--outdir images/built && cp constraints.txt images/built" in text
    assert "/images/built/" in (ROOT / ".gitignore").read_text().splitlines()


def test_packers_image_family_is_the_one_that_instances_boot_by_default():
    config = (ROOT / "sailord/providers/gce/config.py").read_text()
    family = re.search(r'source_image_family += "(.*)"', (IMAGES / "gce.pkr.hcl").read_text())
    assert family is not None
    assert f'"{family[1]}"' in config


def test_packers_template_has_balanced_blocks():
    text = re.sub(r'"[^"\n]*"|#.*', "", (IMAGES / "gce.pkr.hcl").read_text())
    assert text.count("{") == text.count("}") > 5
    assert text.count("[") == text.count("]")
    depth = 0
    for sign in re.findall(r"[{}]", text):
        depth += 1 if sign == "{" else -1
        assert depth >= 0


def test_what_the_recipes_name_is_in_the_wheel_and_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (IMAGES / "install.sh").read_text()
    container = (IMAGES / "Containerfile").read_text()
    extras = re.findall(r"\$wheel\[(.*?)\]", script)
    assert extras == ["worker"]
    assert extras[0] in project["optional-dependencies"]
    pins = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    named = re.findall(r'install "\$\{pins\[@\]\}" (.*)', script)
    packages = {
        word for words in named for word in words.split() if re.fullmatch(r"[a-z0-9-]+", word)
    }
    assert packages == {"torch", "numpy", "safetensors", "gcsfs"}
    assert packages <= pins
    (imported,) = re.findall(r"python -c 'import (.*)'", script)
    modules = [each for each in imported.split(", ") if each not in packages]
    assert modules
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    commands = {*re.findall(r"/opt/sailor/bin/(\S+)", script)} - {"python"}
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]', container, re.MULTILINE)
    assert commands | {entry} <= project["scripts"].keys()
    assert f"sailor-agent:{project['version']} " in container


def test_the_container_runs_the_agent_as_its_unit_does():
    container = (IMAGES / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])", container, re.MULTILINE)
    (rest,) = re.findall(r"^CMD (\[.*\])", container, re.MULTILINE)
    words = " ".join([*json.loads(entry), *json.loads(rest)])
    unit = (ROOT / "systemd/sailor-agent.service").read_text()
    assert f"ExecStart=/usr/bin/{words}\n" in unit
    (home,) = re.findall(r"--home-dir (\S+)", container)
    assert tomllib.loads((ROOT / "systemd/etc/agent.toml").read_text())["state"] == home
