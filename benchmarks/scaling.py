"""Time and memory of ``log_prob`` as the number of coordinates grows, at a fixed width for each coordinate.

With k units for each of d coordinates the weights have O(d^2 k^2) entries, the values O(d k) for each row.
Time: the median of interleaved calls. Memory: the most that torch held at one moment of a call beyond what
was there before it (weights, data), from the profiler's record of every allocation: exact, without noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import quarflow as qf
from benchmarks.harness import Spread, interleave, load, save, start, table, timed
from quarflow.bench import peak_memory

HIDDEN, BLOCKS, BATCH = (8, 8), 4, 256


def calls(d: int) -> dict[str, Callable[[], object]]:
    """The two things to measure at ``d`` coordinates."""
    flow = qf.models.quar(d, blocks=BLOCKS, hidden=HIDDEN)
    x = torch.randn(BATCH, d)
    flow.initialise(torch.randn(BATCH, d))

    def backward() -> None:
        flow.log_prob(x).sum().backward()
        flow.zero_grad()

    return {"forward": torch.no_grad()(lambda: flow.log_prob(x)), "forward and backward": backward}


def exponent(d: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return statistics.linear_regression([math.log(v) for v in d], [math.log(v) for v in values]).slope


def measure(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row of results for each size and each kind of call."""
    todo = {(d, kind): call for d in sizes for kind, call in calls(d).items()}
    times = interleave({key: timed(call, least=0.02) for key, call in todo.items()}, rounds, warmup=1)
    return [
        {
            "d": d,
            "call": kind,
            "milliseconds": Spread.of([1e3 * t for t in times[d, kind]]),
            "mebibytes": peak_memory(call) / 2**20,
        }
        for (d, kind), call in todo.items()
    ]


def growth(rows: Sequence[dict[str, Any]], key: str, name: str) -> str:
    """Time and memory of each kind of call by ``key``, with exponents, in Markdown."""
    kinds = list(dict.fromkeys(row["call"] for row in rows))
    found = {kind: [row for row in rows if row["call"] == kind] for kind in kinds}
    sizes = [row[key] for row in found[kinds[-1]]]  # of a run that was cut, those that are whole
    columns = [
        (f"{kind}: {unit}", values[: len(sizes)])
        for kind in kinds
        for unit, values in (
            ("ms", [row["milliseconds"].median for row in found[kind]]),
            ("MiB", [row["mebibytes"] for row in found[kind]]),
        )
    ]
    body: list[list[object]] = [[d, *(values[i] for _, values in columns)] for i, d in enumerate(sizes)]
    if len(sizes) > 1:
        body += [["exponent", *(exponent(sizes, values) for _, values in columns)]]
    if len(sizes) > 3:
        body += [[f"from {sizes[-3]} on", *(exponent(sizes[-3:], values[-3:]) for _, values in columns)]]
    return table([name, *(column for column, _ in columns)], body)


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    return growth(result["rows"], "d", "d")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    sizes, rounds = ([4, 8], 3) if options.quick else ([8, 16, 32, 64, 128, 256, 512], 15)
    settings = {"hidden": HIDDEN, "blocks": BLOCKS, "batch": BATCH, "rounds": rounds}
    path = save(options, "scaling", settings, measure(sizes, rounds))
    print(show(load(path)))


if __name__ == "__main__":
    main()
