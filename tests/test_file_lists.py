"""READMEs of packages list each file with its first line, and say where to begin."""

from __future__ import annotations

import importlib.util

import pytest

from tests.python_files import PACKAGES, ROOT

_spec = importlib.util.spec_from_file_location("file_lists", ROOT / "scripts" / "file_lists.py")
file_lists = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(file_lists)

LISTED = {
    "__init__.py": '"""The package."""',
    "top.py": '"""At the ``top``.\n\nMore."""',
    "wing/__init__.py": '"""A wing."""',
    "wing/one.js": "// One. Two.",
    "wing/inner/__init__.py": '"""Inner."""',
    "wing/inner/a.py": '"""A."""',
    "wing/inner/b.sh": "#!/bin/sh\n# B.",
    "wing/inner/c.css": "/* C. */",
    "wing/inner/d.py": '"""D?"""',
    "wing/small/e.py": '"""E."""',
    "wing/small/f.py": '"""F."""',
    "wing/alone/g.toml": "# G.",
    "wing/empty/h.json": "{}",
}
PACKAGE_LIST = """\
- [`wing/`](wing/README.md) \N{EN DASH} A wing.
- `top.py` \N{EN DASH} At the `top`.
"""
WING_LIST = """\
- `one.js` \N{EN DASH} One. Two.
- `alone/g.toml` \N{EN DASH} G.
- `small/`
  - `e.py` \N{EN DASH} E.
  - `f.py` \N{EN DASH} F.

### `inner/`

Inner.

- `a.py` \N{EN DASH} A.
- `b.sh` \N{EN DASH} B.
- `c.css` \N{EN DASH} C.
- `d.py` \N{EN DASH} D?
"""


def test_readmes_list_each_file_with_its_first_line():
    written = {path.relative_to(ROOT): text for path, text in file_lists.readmes(ROOT)}
    stale = [
        str(path)
        for path, text in written.items()
        if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `make file-lists`"


def test_readmes_say_where_to_begin():
    silent = [
        str(path.relative_to(ROOT))
        for path, text in file_lists.readmes(ROOT)
        if "begin" not in text.partition("\n## Files\n")[0].lower()
    ]
    assert silent == [], "say what the folder is for, and which file to read first"


def test_readmes_lie_where_files_are_listed():
    listed = {path for path, _ in file_lists.readmes(ROOT)} | {ROOT / "sailor" / "README.md"}
    found = {path for package in PACKAGES for path in (ROOT / package).rglob("README.md")}
    assert found - listed == set(), "few files are left there: the README above lists them"


def test_lists_have_files_then_small_folders_then_sections(tmp_path):
    for package in file_lists.PACKAGES:
        for path, line in LISTED.items():
            file = tmp_path / package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(line + "\n", encoding="utf-8")
    (tmp_path / "agents" / "wing" / "README.md").write_text("# wing\n\nHead.\n", encoding="utf-8")
    texts = {str(path.relative_to(tmp_path)): text for path, text in file_lists.readmes(tmp_path)}
    assert texts["agents/README.md"].partition("-->\n\n")[2] == PACKAGE_LIST
    head, _, files = texts["agents/wing/README.md"].partition("\n## Files\n")
    assert head == "# wing\n\nHead.\n"
    assert files.partition("-->\n\n")[2] == WING_LIST
    (tmp_path / "agents" / "top.py").write_text('"""Not a\nline."""\n', encoding="utf-8")
    with pytest.raises(ValueError, match="in one sentence on its first line"):
        list(file_lists.readmes(tmp_path))
