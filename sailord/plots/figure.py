"""Writes a figure as SVG or PNG, by the file's suffix; same content, same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sailord.plots.timeline import unwritable
from simulator.documents.problems import InputError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".svg": "svg", ".png": "png"}

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # Text stays text: small, searchable files.
    "svg.hashsalt": "sailor",  # Otherwise ids are random.
    "text.parse_math": False,  # Dollar signs are prices.
}


def check_picture(path: Path) -> None:
    """Refuse a path that cannot be written, before the work for its content begins."""
    if path.suffix.lower() not in FORMATS:
        what = f'a plot cannot be a "{path.suffix}" file'
        raise InputError(Problem(str(path), what, "use .svg or .png"))
    if not path.parent.is_dir():
        raise unwritable(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def write_figure(path: Path, draw: Callable[[Figure], None]) -> None:
    """Draw a figure with ``draw``, and write it."""
    check_picture(path)
    form = FORMATS[path.suffix.lower()]
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an optional package, a second to load
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package
    except ImportError:
        cure = "install the group plot: make install, or pip install 'CHECKOUT[plot]'"
        raise InputError(Problem("--plot", "matplotlib is not installed", cure)) from None
    with mpl.rc_context():
        mpl.rcdefaults()  # Ignore the user's own style.
        mpl.rcParams.update(_STYLE)
        figure = Figure()
        draw(figure)
        # No date and no release of the library, for equal bytes.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        try:
            figure.savefig(path, format=form, dpi=100, metadata=metadata)
        except OSError as error:
            raise unwritable(path, error) from None
