"""How the pictures look: matplotlib without windows, colours that everyone can tell apart, small files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinct with any kind of colour vision, with grey for yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def canvas(width: float, height: float) -> Figure:
    """A figure of that size in inches, apart from any window and from the caller's pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=200)
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Two lines for axes, not four."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def save_png(figure: Figure, path: Path) -> None:
    """With a palette of 256 colours, which is a third of the size and looks the same."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
