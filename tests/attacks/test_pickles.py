"""Files of strangers name commands to be run; nothing runs them."""

from __future__ import annotations

import os
import pickle
import re
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import SPEC
from worker.checkpoint.other_formats.convert import import_deepspeed
from worker.checkpoint.other_formats.megatron import import_megatron
from worker.checkpoint.other_formats.plain_pickle import DcpReader
from worker.checkpoint.other_formats.torch_dcp import (
    DcpFolder,
    TensorEntry,
    write_dcp,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bomb:
    """Runs a command when it is unpickled."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


def deepspeed(folder: Path, bomb: object) -> None:
    place = folder / "t" / "zero" / "model.embed_tokens.weight"
    place.mkdir(parents=True)
    (folder / "latest_universal").write_text("t")
    torch.save({"global_steps": 3, "x": bomb}, folder / "t" / "mp_rank_00_model_states.pt")


def deepspeed_parameter(folder: Path, bomb: object) -> None:
    deepspeed(folder, None)
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": bomb}, folder / "t/zero/model.embed_tokens.weight" / f"{name}.pt")


def dcp(folder: Path, bomb: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(bomb))


def megatron(folder: Path, bomb: object) -> None:
    dcp(folder, bomb)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": bomb}, folder / "common.pt")


@pytest.mark.parametrize("write", [deepspeed, deepspeed_parameter, dcp, megatron])
def test_imports_run_nothing_that_a_file_names(tmp_path, write, cost):
    folder, mark = tmp_path / "given", tmp_path / "ran"
    write(folder, Bomb(f"touch {mark}"))
    job = read_job(SPEC)
    read = {
        dcp: lambda: DcpFolder(folder),
        megatron: lambda: import_megatron(folder, job, None, "j", tmp_path / "out"),
    }.get(write, lambda: import_deepspeed(folder, job, "j", tmp_path / "out"))
    with pytest.raises(InputError):
        read()
    assert not mark.exists()
    cost(f"13 a pickle of {write.__name__} names a command", "it ran", "refused, it did not run")


def test_a_dotted_name_leads_nowhere(tmp_path):
    """``torch`` is known, but ``os.system`` of it is not a thing of DCP's metadata."""
    mark = tmp_path / "ran"
    command = f"touch {mark}".encode()
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c%c%s\x85R." % (len(command), command)
    )
    with pytest.raises(InputError, match=r"it names torch\.os\.system"):
        DcpFolder(tmp_path)
    assert not mark.exists()


def test_dcp_metadata_names_no_file_outside_its_folder(tmp_path):
    write_dcp([TensorEntry(("a",), (3,), lambda: torch.ones(3))], tmp_path)
    held = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(held.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(InputError, match="names a file outside the folder"):
        DcpFolder(tmp_path)


CHANGES = {
    "pathlib PosixPath parts": b"cpathlib\nPosixPath\nN}X\x05\x00\x00\x00parts)s\x86b0",
    "torch.distributed.checkpoint.metadata MetadataIndex fqn": (
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
        b"N}X\x03\x00\x00\x00fqnX\x01\x00\x00\x00as\x86b0"
    ),
    "torch.serialization _get_layout cache": (
        b"ctorch.serialization\n_get_layout\nN}X\x05\x00\x00\x00cache)s\x86b0"
    ),
}


@pytest.mark.parametrize("named", CHANGES)
def test_dcp_metadata_changes_no_class_or_function(tmp_path, named):
    module, name, attribute = named.split()
    real = PurePosixPath if module == "pathlib" else getattr(sys.modules[module], name)
    missing = object()
    before = vars(real).get(attribute, missing)
    write_dcp([TensorEntry(("a",), (3,), lambda: torch.ones(3))], tmp_path)
    held = (tmp_path / ".metadata").read_bytes()
    # It follows the two bytes of the protocol, and takes off the stack what it left there.
    (tmp_path / ".metadata").write_bytes(held[:2] + CHANGES[named] + held[2:])
    try:
        with pytest.raises(InputError):
            DcpFolder(tmp_path)
        assert vars(real).get(attribute, missing) is before
    finally:  # Other tests need them as they were.
        if before is not missing:
            setattr(real, attribute, before)
        elif attribute in vars(real):
            delattr(real, attribute)


def test_dcp_metadata_is_read_as_torch_wrote_it(tmp_path):
    whole = TensorEntry(
        ("a", "b"), (3,), lambda: torch.ones(3, dtype=torch.bfloat16), torch.bfloat16
    )
    write_dcp([whole, TensorEntry(("c",), (), lambda: BytesIO(b"x"), is_bytes=True)], tmp_path)
    own, torchs = DcpReader(tmp_path).read_metadata(), FileSystemReader(tmp_path).read_metadata()
    assert own.storage_meta is not None
    assert torchs.storage_meta is not None
    own.storage_meta.load_id = torchs.storage_meta.load_id
    torchs.storage_meta.checkpoint_id = str(torchs.storage_meta.checkpoint_id)
    assert own == torchs


def test_only_named_places_read_pickles():
    """A new reader of pickles has to say why it may."""
    unsafe = re.compile(
        r"pickle\.loads?\(|Unpickler|weights_only=False|allow_pickle=True|shelve|marshal"
        r"|_object_list|gather_object|np\.load\((?!.*allow_pickle=False)|torch\.load\((?!.*weights_only=True)"
    )
    allowed = {
        # Exactly the classes of DCP's metadata.
        "worker/checkpoint/other_formats/plain_pickle.py",
        # Bytes that this process itself made, in its memory.
        "sailord/planning/precomputed.py",
    }
    found = {
        str(path.relative_to(ROOT))
        for package in ("agents", "planner", "sailor", "sailord", "simulator", "worker")
        for path in (ROOT / package).rglob("*.py")
        if unsafe.search(path.read_text(encoding="utf-8"))
    }
    assert found - allowed == set()
