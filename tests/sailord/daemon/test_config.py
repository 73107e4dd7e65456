"""All mistakes in sailord's configuration are told at once, before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sailord.config import PAGERDUTY, load_config
from sailord.main import main
from simulator.documents.problems import InputError


def test_all_mistakes_are_reported_at_once(tmp_path):
    (tmp_path / "short").write_text("abc")
    file = tmp_path / "sailord.toml"
    file.write_text(
        'cluster_name = "Not A Name"\nstate = "s"\ncluster = "none.toml"\nstore = "ftp://x"\n'
        'unknown = 1\n[listen]\nport = 99999\ntoken_file = "short"\n'
        '[options]\nlease_s = -1\n[[webhooks.receiver]]\nurl = "nowhere"\n'
    )
    with pytest.raises(InputError) as told:
        load_config(file)
    text = str(told.value)
    for word in ("cluster_name", "key", "none.toml", "unknown scheme", "unknown", "port",
                 "token_file", "lease_s", "url", "secret_file"):  # fmt: skip
        assert word in text, text
    done = CliRunner().invoke(main, ["check", "--config", str(file)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_receivers_of_each_format_are_read(tmp_path):
    (tmp_path / "slack.url").write_text("https://hooks.example/T0/B0\n")
    (tmp_path / "routing").write_text("a-routing-key-of-32-characters!!\n")
    (tmp_path / "key").write_text("k" * 64)
    for name in ("slack.url", "routing", "key"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "cluster.toml").write_text(
        '[[pool]]\nzone = "us-central1-a"\nmachine = "A100-40x8"\nmachines = 2\n'
    )
    begin = 'cluster_name = "c"\nstate = "s"\nkey = "key"\ncluster = "cluster.toml"\n'
    file = tmp_path / "sailord.toml"
    file.write_text(
        f'{begin}[[webhooks.receiver]]\nformat = "slack"\nurl_file = "slack.url"\n'
        'events = ["job_held"]\n[[webhooks.receiver]]\nformat = "pagerduty"\n'
        'secret_file = "routing"\n'
    )
    slack, pager = load_config(file).webhooks.receivers
    assert (slack.url, slack.events) == ("https://hooks.example/T0/B0", ("job_held",))
    assert (pager.url, pager.secret) == (PAGERDUTY, b"a-routing-key-of-32-characters!!")
    for name in ("slack.url", "routing"):
        (tmp_path / name).chmod(0o640)
    with pytest.raises(InputError) as told:
        load_config(file)
    assert str(told.value).count("is a secret, and its mode 0640 lets others use it") == 2
    assert f"chmod 600 {tmp_path}/routing" in str(told.value)
    file.write_text(
        f'{begin}[[webhooks.receiver]]\nformat = "slack"\n[[webhooks.receiver]]\n'
        'format = "pagerduty"\nevents = ["job_eaten"]\n[[webhooks.receiver]]\nformat = "pigeon"\n'
    )
    with pytest.raises(InputError) as told:
        load_config(file)
    for word in ("give it, or url_file", "contains the routing key", "job_eaten", "pigeon"):
        assert word in str(told.value)


def test_address_of_the_collector_is_read(place):
    file = place.config
    begin = file.read_text()
    assert load_config(file).otlp is None
    file.write_text(f'{begin}\n[telemetry]\notlp = "http://127.0.0.1:4318"\n')
    assert load_config(file).otlp == "http://127.0.0.1:4318"
    for wrong in ('otlp = "localhost:4318"', "", 'oltp = "http://h"'):
        file.write_text(f"{begin}\n[telemetry]\n{wrong}\n")
        with pytest.raises(InputError, match="telemetry"):
            load_config(file)


def test_check_reports_missing_files(place):
    said = CliRunner().invoke(main, ["check", "--config", str(place.config)])
    assert said.exit_code == 0
    place.key.write_text("short")
    text = place.config.read_text()
    way = "etcd://h?user=a&password_file=/none&ca=/neither"
    place.config.write_text(f'store = "{way}"\n{text}')
    said = CliRunner().invoke(main, ["check", "--config", str(place.config)])
    assert said.exit_code == 2
    for words in ("the cluster's key has 5 bytes", "its password_file, /none, cannot be read",
                  "its ca, /neither, cannot be read"):  # fmt: skip
        assert words in said.output


def test_a_second_sailord_on_the_same_folder_is_refused(place):
    assert CliRunner().invoke(main, ["check", "--config", str(place.config)]).exit_code == 0
    from sailord.controller.election import lock_state_folder  # noqa: PLC0415 - the lock is taken in this process

    taken = lock_state_folder(place.folder / "x")
    with pytest.raises(InputError, match="another sailord"):
        lock_state_folder(place.folder / "x")
    assert len(taken.id) == 32


def test_jobs_do_not_share_the_nodes_of_a_provider(place):
    file = place.config
    begin = file.read_text().replace("[options]\n", "[options]\nshare = true\n")
    file.write_text(begin)
    assert load_config(file).options.share
    pool = (
        '[[provider.pool]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-1g"\nusd_per_hour = 1.0\n'
    )
    (place.folder / "agent.toml").write_text("")
    file.write_text(
        f'{begin}\n[provider]\nkind = "emulated"\nfolder = "rented"\nagent = "agent.toml"\n{pool}'
    )
    with pytest.raises(InputError, match="share is set, and there is a"):
        load_config(file)
    file.write_text(begin.replace("share = true", "share = 1"))
    with pytest.raises(InputError, match="share"):
        load_config(file)


@pytest.mark.parametrize(
    "address", ["https://hooks..example/x", "https://[::1/way/in", "https://host:port/in"]
)
def test_an_address_that_no_client_takes_is_refused(address: str, tmp_path) -> None:
    """The first message to it ended sailord."""
    (tmp_path / "hidden").write_text(f"{address}\n")
    (tmp_path / "hidden").chmod(0o600)
    file = tmp_path / "sailord.toml"
    receiver = '[[webhooks.receiver]]\nformat = "slack"\n'
    file.write_text(
        f'[telemetry]\notlp = "{address}"\n{receiver}url = "{address}"\n'
        f'{receiver}url_file = "hidden"\n'
    )
    with pytest.raises(InputError) as told:
        load_config(file)
    text = str(told.value)
    for place in ("[webhooks.receiver[0]]: url: ", "[webhooks.receiver[1]]: url_file: holds no",
                  "[telemetry] otlp: "):  # fmt: skip
        assert place in text, text


def test_keys_of_an_earlier_version_are_accepted_and_named(place):
    file = place.config
    file.write_text(
        f"{file.read_text()}[network]\npairs = 9\n[capacity]\nlook_s = 5\nboot_s = 5\n"
        "[capacity.testing]\nlost_s = 2\nboot_s = 7\n"
    )
    config = load_config(file)
    assert (config.network.pairs, config.capacity.look_s) == (3, 10.0), "these are constants"
    assert (config.capacity.lost_s, config.capacity.boot_s) == (2.0, 7.0)
    assert config.unread == (f"{file.name}: [capacity] look_s", f"{file.name}: [network] pairs")
    said = CliRunner().invoke(main, ["check", "--config", str(file)])
    assert said.exit_code == 0
    assert f"warning: {file.name}: [network] pairs is no longer read\n" in said.output
    file.write_text(file.read_text().replace("lost_s", "lots_s"))
    with pytest.raises(InputError, match="unknown key"):
        load_config(file)


ONCE_READ = {
    "options": (
        *("start_gather_s", "grace_s", "plan_s", "stop_s", "unprepared_s", "suspect_s", "broken_s"),
        *("probe_s", "reconsider_s", "failure_pause_s", "slow_steps", "slow_s", "steps_of_health"),
    ),
    "capacity": (
        *("lost_s", "look_s", "doubt_s", "delete_again_s", "rest_max_s", "boot_failures_max"),
    ),
    "network": ("fresh_hours", "pairs", "seconds_each", "quiet_mbytes_per_s"),
}
"""Keys that a version before ADR 121 read, and that operators may still have in their files."""


def test_no_key_of_an_earlier_version_keeps_sailord_from_starting(place):
    """Some of the constants have other names by now."""
    file = place.config
    begin = file.read_text().partition("[options]")[0]
    sections = [
        "\n".join([f"[{section}]", *(f"{key} = 1" for key in keys)])
        for section, keys in ONCE_READ.items()
    ]
    file.write_text("\n".join([begin, *sections, ""]))
    assert sorted(load_config(file).unread) == sorted(
        f"{file.name}: [{section}] {key}" for section, keys in ONCE_READ.items() for key in keys
    )
