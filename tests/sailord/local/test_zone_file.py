"""Zone files are read whole, and every mistake in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sailord.local.zone_file import EmulatedLink, load_zones
from simulator.documents.problems import InputError

ROOT = Path(__file__).resolve().parents[3]


def read(tmp_path: Path, text: str):
    file = tmp_path / "zones.toml"
    file.write_text(text)
    return load_zones(file)


def test_example_has_four_nodes_and_links_both_ways():
    zones = load_zones(ROOT / "examples/zones.toml")
    assert zones.machines == (
        ("large", "zone-a"), ("large", "zone-a"), ("large", "zone-b"), ("small", "zone-c"),
    )  # fmt: skip
    assert (
        zones.links["zone-a", "zone-c"]
        == zones.links["zone-c", "zone-a"]
        == EmulatedLink(15.0, 100.0)
    )
    assert zones.zones["zone-c"].times_slower == 2.0


def test_link_may_be_one_way(tmp_path):
    two = '[[zone]]\nname = "zone-a"\n[[zone]]\nname = "zone-b"\n'
    there = '[[link]]\nfrom = "zone-a"\nto = "zone-b"\nmbit_per_s = 5\none_way = true\n'
    back = '[[link]]\nfrom = "zone-b"\nto = "zone-a"\ndelay_ms = 3\none_way = true\n'
    links = read(tmp_path, two + there + back).links
    assert links == {
        ("zone-a", "zone-b"): EmulatedLink(0.0, 5.0),
        ("zone-b", "zone-a"): EmulatedLink(3.0),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ('[[zone]]\nname = "paris"\n', ["name zones zone-a to zone-z"]),
        ('[[zone]]\nname = "zone-a"\nnodes = 0\ngpu = "H100"\n', ["1 to 64", '"large" or "small"']),
        ('[[zone]]\nname = "zone-a"\n[[zone]]\nname = "zone-a"\n', ['is "zone-a" again']),
        (
            '[[zone]]\nname = "zone-a"\n[[link]]\nfrom = "zone-a"\nto = "zone-b"\ndelay_ms = -1\n',
            ['"zone-b", which is not a zone here', "at least 0"],
        ),
        ('[[zone]]\nname = "zone-a"\n[[link]]\nfrom = "zone-a"\nto = "zone-a"\n', ["comes from"]),
        ('[[zone]]\nname = "zone-a"\nspeed = 3\n', ['unknown key "speed"']),
        (
            '[[zone]]\nname = "zone-a"\n[[zone]]\nname = "zone-b"\n'
            + '[[link]]\nfrom = "zone-a"\nto = "zone-b"\n' * 2,
            ["linked a second time"],
        ),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    told = "\n".join(map(str, caught.value.problems))
    assert [word for word in words if word not in told] == []
