"""What leaves this machine needs TLS, or insecure = true."""

from __future__ import annotations

import pytest

from agents.rpc.tls_settings import TlsSettings, read_tls
from simulator.documents.fields import open_table
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problems

HERE, THERE = "127.0.0.1", "10.0.0.1:7078"
NOTHING = "other = 1"
ETCD = "etcd://10.0.0.1:2379"


def read(
    tmp_path, text, *, host=HERE, address=None, store=None, may_sign=False
) -> TlsSettings | None:
    problems = Problems()
    top = open_table(parse_document(f"{text or NOTHING}\n".encode(), name="agent.toml"), problems)
    found = read_tls(
        top, tmp_path, tmp_path / "state", may_sign=may_sign, store=store,
        named={"listen.host": host, "listen.address": address},
    )  # fmt: skip
    problems.raise_if_any()
    return found


@pytest.mark.parametrize("host", [HERE, "localhost", "::1", "127.9.9.9"])
def test_on_this_machine_plain_http_is_the_default(tmp_path, host):
    assert read(tmp_path, "", host=host, address="[::1]:7078", store="unix:///s") is None


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ({"host": "0.0.0.0"}, "listen.host 0.0.0.0"),
        ({"host": "::"}, "listen.host ::"),
        ({"address": THERE}, f"listen.address {THERE}"),
        ({"address": "head.internal:7078"}, "listen.address head.internal:7078"),
        ({"store": ETCD}, "store: 10.0.0.1:2379"),
        ({"store": "etcd://127.0.0.1,other:2379"}, "store: other:2379"),
    ],
)
def test_another_machine_needs_tls_or_insecure(tmp_path, what, place):
    with pytest.raises(InputError, match=r"has no TLS; .*insecure = true") as refused:
        read(tmp_path, "", **what)
    assert place in str(refused.value)
    assert read(tmp_path, "[tls]\ninsecure = true", **what) is None


def test_an_agent_that_enrols_makes_its_files_in_its_state_folder(tmp_path):
    found = read(tmp_path, f'[tls]\nca = "ca.pem"\nenrol = "{THERE}"', address=THERE)
    assert found is not None
    made = tmp_path / "state" / "tls"
    files = found.files
    assert (files.ca, files.certificate, files.key, files.revoked) == (
        tmp_path / "ca.pem", made / "certificate.pem", made / "key.pem", made / "revoked.pem",
    )  # fmt: skip
    assert (found.enrol, found.made_in) == (THERE, made)


def test_sailord_with_an_authority_needs_nothing_else(tmp_path):
    found = read(tmp_path, '[tls]\nauthority = "ca"', address=THERE, may_sign=True)
    assert found is not None
    assert found.files.ca == tmp_path / "ca" / "ca.pem"
    assert found.files.revoked == tmp_path / "ca" / "revoked.pem"
    assert (found.authority, found.enrol) == (str(tmp_path / "ca"), None)


def test_a_standby_enrols_as_agents_do_and_has_no_authority_beside(tmp_path):
    found = read(tmp_path, f'[tls]\nca = "ca.pem"\nenrol = "{THERE}"', may_sign=True)
    assert found is not None
    assert (found.authority, found.enrol) == (None, THERE)
    assert found.files.certificate == tmp_path / "state" / "tls" / "certificate.pem"
    with pytest.raises(InputError, match=r"enrol.*contradicts authority"):
        read(tmp_path, f'[tls]\nauthority = "ca"\nenrol = "{THERE}"', may_sign=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('insecure = true\nca = "ca.pem"', "contradicts ca"),
        ('ca = "ca.pem"\ncertificate = "c.pem"', r"key.*is missing"),
        ('enrol = "head:7077"', "is missing"),
        ('ca = "a"\nkey = "k"\nenrol = "head:7077"', "contradicts enrol"),
        ('ca = "a"\nauthority = "ca"', "unknown key"),
        ("insecure = 1", "give true or false"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        read(tmp_path, f"[tls]\n{text}")


def test_with_tls_an_etcd_in_clear_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"10\.0\.0\.1:2379 is not this machine, and has no TLS"):
        read(tmp_path, f'[tls]\nca = "a"\nenrol = "{THERE}"', store=ETCD)
    assert read(tmp_path, f'[tls]\nca = "a"\nenrol = "{THERE}"', store=f"{ETCD}?ca=/ca.pem")
