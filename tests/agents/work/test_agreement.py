"""All nodes of a job have the packages that its first node installed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from agents.protocol.records import PREPARING
from agents.work.agreement import PackagesDifferError, check_agreed, installed
from agents.work.package import package_of
from tests.agents.work.preparing import JOB, RUNNING, Node, packed
from tests.agents.work.wheels import wheel


@pytest.fixture
def node(tmp_path, fetcher):
    return Node(tmp_path / "node", fetcher)


@pytest.mark.slow
async def test_later_nodes_install_what_the_first_one_did(tmp_path, node, fetcher, sources):
    """A registry has got a newer version meanwhile."""
    archive, shop = packed(tmp_path, train=b"print()"), tmp_path / "shop"
    shop.mkdir()
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    wheel(shop, "tiny", "1.0")
    install = f"pip install -q --no-index --no-deps --find-links {shop} tiny"
    node.job(archive, setup=[install])
    with contextlib.closing(node.preparation):
        await node.prepared()
    assert node.store == {JOB: "tiny==1.0\n"}
    wheel(shop, "tiny", "2.0")
    later = Node(tmp_path / "later", fetcher)
    later.text, later.store = node.text, node.store
    with contextlib.closing(later.preparation):
        view = await later.prepared()
    assert installed(Path(view["packages"])) == {"tiny": "1.0"}


async def test_a_node_with_other_packages_is_unfit_and_tries_again(tmp_path, node, sources):
    """A command that heeds no constraints installs 2.0 at first, and 1.0 later."""
    archive, count = packed(tmp_path, train=b"print()"), tmp_path / "count"
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    command = (
        f"V=$(test -e {count} && echo 1.0 || echo 2.0); touch {count}; "
        "D=$(echo $VIRTUAL_ENV/lib/python*/site-packages)/tiny-$V.dist-info; mkdir $D; "
        "printf 'Metadata-Version: 2.1\\nName: tiny\\nVersion: '$V'\\n' > $D/METADATA"
    )
    node.job(archive, setup=[command])
    node.store = {JOB: "other==1\ntiny==1.0\n"}
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        while (why := await node.told.get()) == PREPARING:
            pass
        assert why == (
            "setup installed other packages than on the job's first node: other is missing here "
            "and 1 there, tiny is 2.0 here and 1.0 there; name versions in the setup command"
        )
        node.store[JOB] = "tiny==1.0\n"
        while await node.told.get():
            pass
        await node.prepared()


def test_error_names_three_packages_and_counts_the_rest():
    agreed = "".join(f"p{number}==1\n" for number in range(9))
    check_agreed({f"p{number}": "1" for number in range(9)}, agreed)
    with pytest.raises(PackagesDifferError, match="p2 is missing here and 1 there and 6 more"):
        check_agreed({}, agreed)
