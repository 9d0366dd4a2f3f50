"""A picture of the costs on a GPU, from the results that are there: ``python -m benchmarks.speed``.

Left, a training step, a test pass and samples of the paper's CIFAR-10 flow, by QuAR and by its residual twin, and by
Newton and by Banach. Middle, how a training step grows. Right, training steps on vectors beside zuko's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, load, number
from benchmarks.table2 import ratios

NAME = "speed.png"
MANY = {"batch": "batch", "depth": "blocks", "size": "side of images", "width": "width", "D of vectors": "D of vectors"}


def costs(axes: Any, result: dict[str, Any]) -> None:
    """Pairs of bars, with how many times as long the longer one is."""
    from experiments.drawing import COLOURS

    rows = ratios(result)
    for i, (_, ours, other, times, paper) in enumerate(rows):
        for shift, ms, colour in ((-0.2, ours, COLOURS[0]), (0.2, other, COLOURS[1])):
            axes.barh(i + shift, ms, 0.38, color=colour)
            axes.text(ms, i + shift, f" {number(ms)}", va="center", fontsize=7)
        beside = "" if paper == "-" else f", the paper's {paper}x"
        where = {"ha": "right", "va": "center", "transform": axes.get_yaxis_transform()}
        axes.text(0.99, i - 0.2, f"{number(times)}x{beside}", fontsize=7, **where)
    axes.set_yticks(range(len(rows)), [str(row[0]).partition(",")[0] for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ms", title="QuAR; residual flow, or Banach")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 3, 20 * high)


def growth(axes: Any, result: dict[str, Any]) -> None:
    """A training step against what changes, both over their values in the middle of the range."""
    from experiments.drawing import COLOURS

    steps = [row for row in result["rows"] if row["call"] == "training step"]
    for colour, axis in zip(COLOURS, dict.fromkeys(row["axis"] for row in steps), strict=False):
        found = [(row["value"], row["milliseconds"].median) for row in steps if row["axis"] == axis]
        values, times = zip(*found, strict=True)
        base = result["settings"]["images"].get(axis, values[len(values) // 2])
        at = times[values.index(base)] if base in values else times[-1]
        label = f"{MANY[axis]} (1: {base}, {number(at)} ms)"
        axes.plot([v / base for v in values], [t / at for t in times], "o-", ms=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="times as much", title="a training step takes times as long")
    axes.legend(fontsize=6, frameon=False)


def vectors(axes: Any, result: dict[str, Any]) -> None:
    """Bars for each D and way, of the models that ran."""
    from experiments.drawing import COLOURS

    rows = [row for row in result["rows"] if "failed" not in row]
    groups = list(dict.fromkeys((row["d"], row["way"]) for row in rows))
    for j, (colour, model) in enumerate(zip(COLOURS, dict.fromkeys(row["model"] for row in rows), strict=False)):
        here = [row for row in rows if row["model"] == model]
        places = [groups.index((row["d"], row["way"])) + 0.27 * (j - 1) for row in here]
        axes.bar(places, [row["milliseconds"].median for row in here], 0.25, color=colour, label=model)
    axes.set_xticks(range(len(groups)), [f"D = {d}\n{way}".replace(" g", "\ng") for d, way in groups])
    axes.set(yscale="log", ylabel="ms", title=f"a training step, batch {result['settings']['batch']}")
    axes.set_ylim(top=3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=6, frameon=False, ncols=3, loc="upper center")


PANELS: dict[str, Callable[[Any, dict[str, Any]], None]] = {"table2": costs, "growth": growth, "vectors": vectors}


def draw(folder: Path) -> Path | None:
    """The picture of the results in ``folder``, into it; None where there is none of them."""
    from experiments.drawing import canvas, plain, save_png

    found = {name: load(path) for name in PANELS if (path := folder / f"{name}.json").exists()}
    if not found:
        return None
    figure = canvas(4.2 * len(found), 3.2)
    for axes, (name, result) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        PANELS[name](axes, result)
        axes.title.set_fontsize(8)
        axes.tick_params(which="both", labelsize=7)
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
        plain(axes)
    figure.supxlabel("; ".join(dict.fromkeys(str(r.get("gpu") or r["cpu"]) for r in found.values())), fontsize=7)
    save_png(figure, folder / NAME)
    return folder / NAME


def main() -> None:
    """Draws the committed results, or those of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    folder = parser.parse_args().out
    path = draw(folder)
    if path is None:
        names = ", ".join(f"{name}.json" for name in PANELS)
        raise SystemExit(f"speed: expected one of {names} in {folder}; got none. Run these benchmarks first.")
    print(path)


if __name__ == "__main__":
    main()
