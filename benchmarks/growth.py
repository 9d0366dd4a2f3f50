"""How the cost of QuAR grows on a GPU: with batch, width, depth and size of images, and with D of vectors.

One thing at a time changes from a flow for images of one scale, 3x32x32, 12 blocks of width 576, batch 96, in bf16; and
from one for vectors in float32, with the layers of `benchmarks.scaling`, which has the same on one CPU thread. A
training step is everything, as one CUDA graph. Memory is what torch held at most beyond weights, moments and data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import quarflow as qf
from benchmarks.harness import load, number, save, start
from benchmarks.scaling import BLOCKS, HIDDEN, growth
from quarflow.bench import free, made_up, observe, training
from quarflow.precision import products

IMAGES = {"size": 32, "width": 576, "depth": 12, "batch": 96}
AXES = {
    "batch": (12, 24, 48, 96, 192, 384),
    "depth": (3, 6, 12, 24),
    "size": (16, 24, 32, 48, 64),
    "width": (144, 288, 576, 1152),
}
VECTORS = {"d": (8, 16, 32, 64, 128, 256, 512), "batch": 4096}


def settings(quick: bool) -> tuple[dict[str, int], dict[str, Sequence[int]], Sequence[int], int]:
    """The flow for images and what changes of it, the D of vectors and their batch."""
    if quick:
        return {"size": 4, "width": 6, "depth": 1, "batch": 2}, {"batch": (2, 4), "size": (4, 8)}, (2, 4), 8
    return IMAGES, dict(AXES), VECTORS["d"], VECTORS["batch"]  # type: ignore[return-value]


def measure(quick: bool, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row of results for each axis, value on it, and kind of call."""
    base, axes, dimensions, batch = settings(quick)
    for axis, values in axes.items():
        for value in values:
            if axis == "width":
                torch.compiler.reset()  # it gives up where one function has had many shapes
            now = base | {axis: value}
            shape, hidden = (3, now["size"], now["size"]), now["width"]
            flow = qf.models.quar_image(shape, blocks=(now["depth"],), hidden=hidden, activation="elu")
            yield from calls({"axis": axis, "value": value}, flow.to(device), now["batch"], "bf16", rounds)
            del flow
    for d in dimensions:
        vectors = qf.models.quar(d, blocks=BLOCKS, hidden=HIDDEN).to(device)
        yield from calls({"axis": "D of vectors", "value": d}, vectors, batch, "full", rounds)
        del vectors


def calls(
    where: Mapping[str, Any], flow: qf.Flow, batch: int, precision: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """A training step, and a log-density without gradients."""
    device = flow.base.anchor.device
    data = made_up(flow, 4 * batch)
    v = data.values(flow.base.anchor)[:batch]
    flow.initialise(v)
    with torch.no_grad(), products(precision, device):
        alone = observe(lambda: flow(v), rounds, device)
    with training(flow, data, batch, precision, graph=True) as advance:
        step = observe(advance, rounds, device, warm_up=9 if device.type == "cuda" else 1)
    del advance
    free(device)
    for name, found in (("log_prob", alone), ("training step", step)):
        yield {**where, "call": name, **found}


def show(result: dict[str, Any]) -> str:
    """A table for each axis, in Markdown."""
    axes = dict.fromkeys(row["axis"] for row in result["rows"])
    return "\n\n".join(growth([r for r in result["rows"] if r["axis"] == axis], "value", axis) for axis in axes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not options.quick:
        raise SystemExit("growth: expected a GPU that torch sees; got none. --quick --out FOLDER runs anywhere.")
    rows: list[dict[str, Any]] = []
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    base, axes, dimensions, batch = settings(options.quick)
    sizes = {"images": base, "axes": axes, "vectors": {"d": dimensions, "batch": batch}}
    for found in measure(options.quick, 2 if options.quick else 10, device):
        rows.append(found)
        path = save(options, "growth", sizes, rows, gpu=gpu)  # after each: a run that is cut loses little
        print(found["axis"], found["value"], found["call"], number(found["milliseconds"].median), "ms", flush=True)
    print(show(load(path)))


if __name__ == "__main__":
    main()
