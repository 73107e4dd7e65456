"""Real agents without any sailord: a node gets a package from the node that has it."""

from __future__ import annotations

from agents.protocol.codec import decode, encode
from agents.protocol.records import JobRecord, Output
from agents.store.interface import Put
from agents.work.archive import pack
from agents.work.package import package_of
from tests.agents.running import JOB, OTHER_KEY, PREFIX, place
from tests.processes import until


async def test_a_package_survives_sailord_on_the_nodes_that_have_it(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print()")
    with (tmp_path / "packed").open("wb") as out:
        pack(source, ["train.py"], out)
    package = package_of(tmp_path / "packed")
    async with place(tmp_path) as here:
        here.start("a")
        here.start("b")
        await here.ready("a")
        await here.ready("b")
        kept = here.state("a") / "work" / "packages"
        kept.mkdir(parents=True)
        (tmp_path / "packed").rename(kept / str(package))
        spec = f'[work]\npackage = "{package}"\nsetup = ["echo it is set up"]\n'
        job = f"{PREFIX}job/{JOB}"
        record = encode(JobRecord(JOB, "running"))
        await here.store.transact(
            [], [Put(f"{job}/spec", spec.encode()), Put(f"{job}/state", record)]
        )
        await until(lambda: list(here.state("b").glob("work/folders/*/ready")))
        (unpacked,) = here.state("b").glob("work/folders/*/work")
        assert (unpacked / "train.py").read_text() == "print()"
        status, log = await here.ask("GET", "/v1/logs/setup", name="b")
        (part,) = decode(Output, log).parts
        assert (status, part.text) == (200, "$ echo it is set up\nit is set up\n")
        status, _ = await here.ask("GET", f"/v1/packages/{package}/1")
        assert status == 404
        status, _ = await here.ask("GET", f"/v1/packages/{package}/0", key=OTHER_KEY)
        assert status == 401
