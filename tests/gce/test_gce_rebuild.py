"""The head of a cluster that rents its instances is destroyed; nothing rented is orphaned."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.gce.rented_cluster import HERE, LARGE, THERE, RentedCluster, rented_cluster
from tests.gce.test_gce_story import CAPACITY
from tests.sailord.daemon.running import ROOT
from tests.sailord.providers.emulated_cluster import wait_until

pytestmark = pytest.mark.at_length


def back_up(life: RentedCluster) -> None:
    """Run the documented command."""
    folder = life.place.folder
    subprocess.run(
        [sys.executable, "-m", "sailord.main", "backup", folder / "backup.db",
         "--config", folder / "sailord.toml"],
        cwd=ROOT, check=True,
    )  # fmt: skip


def check_ended(life: RentedCluster) -> None:
    """End the job; every instance must be deleted, and billed as the cloud bills it."""
    books = life.end_job()
    wait_until(lambda: life.cloud.running_operations() == [])
    assert books.spent_usd == pytest.approx(life.cloud.bill(), abs=1e-6)


def test_instances_rented_after_the_backup_are_adopted_and_billed(tmp_path_factory):
    with rented_cluster(tmp_path_factory.mktemp("rebuild") / "c", CAPACITY) as life:
        life.cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 0}
        life.submit()
        wait_until(lambda: life.trains_on(2))
        back_up(life)
        life.cloud.stock = {(HERE, LARGE, True): 0, (THERE, LARGE, True): 2}
        wait_until(lambda: life.trains_on(4))
        life.wait_for_steps()
        step = life.job()["step"]
        life.kill_head()
        head = life.place.folder / "head"
        shutil.rmtree(head)
        head.mkdir(mode=0o700)
        shutil.copy(life.place.folder / "backup.db", head / "store.db")
        life.start_head()
        wait_until(lambda: life.trains_on(4) and life.job()["step"] > step)
        assert len(life.cloud.vms) == 4, "no further instance was rented"
        lost = [text for text in life.history() if " lost): " in text]
        assert all("0 steps lost" in text for text in lost), lost
        check_ended(life)


def test_without_a_backup_instances_are_found_by_their_label(tmp_path_factory):
    with rented_cluster(tmp_path_factory.mktemp("anew") / "c", CAPACITY) as life:
        life.cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 0}
        life.submit()
        wait_until(lambda: life.trains_on(2))
        life.wait_for_steps()
        step = life.job()["step"]
        life.kill_head()
        shutil.rmtree(life.place.folder / "head")
        life.start_head()
        life.submit()
        wait_until(lambda: life.trains_on(2) and life.job()["step"] > step)
        assert len(life.cloud.vms) == 2, "no further instance was rented"
        check_ended(life)
