"""A picture as a file: SVG or PNG by its name, the same bytes for the same content."""

from __future__ import annotations

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
    "svg.fonttype": "none",  # Text stays text: small files that can be searched.
    "svg.hashsalt": "sailor",  # Otherwise the names inside are random.
    "text.parse_math": False,  # Two dollar signs are prices.
}


def check_picture(path: Path) -> None:
    """Refuse what could not be drawn, before anybody waits for what is to be on it."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            Problem(str(path), f'a plot cannot be a "{path.suffix}" file', "use .svg or .png")
        )
    if not path.parent.is_dir():
        raise InputError(
            Problem(str(path), "cannot be written: No such file or directory", "name another file")
        )


def write_figure(path: Path, draw: Callable[[Figure], None]) -> None:
    """Let ``draw`` fill a figure, and write it."""
    check_picture(path)
    form = FORMATS[path.suffix.lower()]
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an optional package, a second to load
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package
    except ImportError:
        cure = "install the group plot: make install, or pip install 'CHECKOUT[plot]'"
        raise InputError(Problem("--plot", "matplotlib is not installed", cure)) from None
    with mpl.rc_context():
        mpl.rcdefaults()  # A person's own style must not change the picture.
        mpl.rcParams.update(_STYLE)
        figure = Figure()
        draw(figure)
        # Neither the date nor the release of the library belongs into the file.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        try:
            figure.savefig(path, format=form, dpi=100, metadata=metadata)
        except OSError as error:
            raise unwritable(path, error) from None
