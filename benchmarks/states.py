"""The state of a training run on disk: size, time to write, and what rounding a part of it to bfloat16 does to the run.

A flow learns scikit-learn's digits; half of its steps are taken by one trainer, the rest by another that goes on from
the first one's state. The bits/dim are those of the averaged weights on validation images at the end, with the same
noise, less those of a run without a break; one row for each kind of state, over seeds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import quarflow as qf
from benchmarks.harness import Spread, load, save, start, table
from quarflow.data.images import load_images
from quarflow.runs import bits
from quarflow.training import Options, Rows, Trainer

KINDS: dict[str, dict[str, Any]] = {
    "one file": {},
    "in pieces of 64 KiB": {"shard_size": "64KiB"},
    "compact": {"compact": True},
}


def trainer(options: Options) -> Trainer:
    """With fresh weights from the seed of ``options``."""
    torch.manual_seed(options.seed)
    images = load_images("digits").train
    train, validation = Rows(images[:1200]), Rows(images[1200:])
    flow = qf.models.quar_image((1, 8, 8), blocks=(2, 2), hidden=32)
    flow.initialise(train[:256].values(flow.base.anchor))
    return Trainer(flow.train(), train, validation, options)


def run(options: Options, kind: dict[str, Any] | None, folder: Path) -> dict[str, float]:
    """Bits/dim at the end, with a break in the middle if there is a kind of state; its size and time."""
    current, found, path = trainer(options), {}, folder / "state"
    steps = options.max_steps or 0
    for step in range(steps):
        if kind is not None and step == steps // 2:
            current.evaluate()  # so that there are best weights, too
            begun = time.perf_counter()
            current.write(path, **kind)
            found["milliseconds"] = 1e3 * (time.perf_counter() - begun)
            found["bytes"] = float(sum(map(os.path.getsize, folder.iterdir())))
            current = trainer(options)
            current.read(path)
        current.advance()
    current.evaluate()
    found["bits"] = bits(current.flow, current.history.validation[-1])
    found["parameters"] = float(sum(p.numel() for p in current.flow.parameters()))
    return found


def measure(steps: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each kind of state."""
    every = [Options(steps, None, 128, 4e-3, clip=1.0, ema=0.99, patience=None, seed=seed) for seed in range(seeds)]
    with tempfile.TemporaryDirectory() as folder:
        whole = [run(options, None, Path(folder))["bits"] for options in every]
    rows = []
    for name, kind in KINDS.items():
        found = []
        for options in every:
            with tempfile.TemporaryDirectory() as folder:
                found.append(run(options, kind, Path(folder)))
        rows.append(
            {
                "state": name,
                "bytes_per_parameter": found[0]["bytes"] / found[0]["parameters"],
                "milliseconds": Spread.of([each["milliseconds"] for each in found]),
                "bits": Spread.of([each["bits"] for each in found]),
                "most_bits_from_whole": max(abs(each["bits"] - b) for each, b in zip(found, whole, strict=True)),
            }
        )
    return rows


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    head = ["state", "bytes for each parameter", "ms to write", "validation bits/dim", "bits/dim that the break moves"]
    keys = ("state", "bytes_per_parameter", "milliseconds", "bits", "most_bits_from_whole")
    return table(head, [[row[key] for key in keys] for row in result["rows"]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    steps, seeds = (6, 1) if options.quick else (600, 3)
    path = save(options, "states", {"steps": steps, "seeds": seeds}, measure(steps, seeds))
    print(show(load(path)))


if __name__ == "__main__":
    main()
