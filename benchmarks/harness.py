"""Timing of several callables side by side, and results that say where, when and of what they were measured.

Everything is compared within one run: each round times every callable once, in a new order, and a ratio is
the median over rounds of two times of the same round. A machine that slows down for a while slows both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from quarflow.bench import Spread, number, processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
Key = TypeVar("Key", bound=Hashable)


def timed(call: Callable[[], object], least: float = 0.0) -> Callable[[], float]:
    """The seconds that ``call`` takes, the mean of calls that last ``least`` seconds in all.

    >>> timed(lambda: None)() < 1
    True
    """

    def seconds(repeat: int) -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - start) / repeat

    repeat = 1
    if least:
        call()
        repeat = max(1, round(least / seconds(1)))
    return lambda: seconds(repeat)


def interleave(measures: Mapping[Key, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[Key, list[float]]:
    """What each callable returns in each round; every round calls all, in an order of its own.

    >>> interleave({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    found: dict[Key, list[float]] = {name: [] for name in measures}
    order, shuffle = list(measures), random.Random(0).shuffle
    for name in order * warmup:
        measures[name]()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection belongs to no callable in particular
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                found[name].append(measures[name]())
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def ratio(values: Sequence[float], reference: Sequence[float]) -> Spread:
    """Of two interleaved measurements, round by round.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 2.0]).median
    2.0
    """
    return Spread.of([v / r for v, r in zip(values, reference, strict=True)])


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Hardware, versions, date and commit: all that a reader needs, nothing that names the machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # of the minute before: above 1, others were at work
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: version(name) for name in packages},
    }


def commit() -> str | None:
    """``QUARFLOW_COMMIT``, or else git's, with ``-dirty`` where files other than results differ; None without git."""
    if said := os.environ.get("QUARFLOW_COMMIT"):
        return said

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/README.md")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def start(
    description: str | None,
    arguments: Sequence[str] | None,
    extend: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """The command line of every benchmark, and what one adds; one thread, the same random numbers, from here on."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    extend(parser)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds: does it run at all?")
    parser.add_argument("--out", type=Path, help="folder of the result (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.out is None:
        if options.quick:
            parser.error("--quick measures nothing worth keeping: give a folder with --out")
        options.out = RESULTS
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return options


def save(
    options: argparse.Namespace,
    name: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    packages: Iterable[str] = (),
    **more: Any,
) -> Path:
    """Writes ``name.json``: environment, settings and rows."""
    result = {"benchmark": name, "quick": options.quick, **environment(packages), **more}
    text = json.dumps({**result, "settings": settings, "rows": rows}, indent=1, allow_nan=False, default=_plain)
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{name}.json"
    path.write_text(text + "\n")
    return path


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote."""
    result: dict[str, Any] = json.loads(path.read_text(), object_hook=_spread)
    return result


def _spread(value: dict[str, Any]) -> object:
    return Spread(**value) if set(value) == {"median", "low", "high"} else value


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"a result holds numbers, text and Spread; got {type(value).__name__}")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers to three digits, a `Spread` with its quartiles.

    >>> print(table(["a", "b"], [["x", 1.23456], ["y", 2]]))
    | a | b |
    | --- | --- |
    | x | 1.23 |
    | y | 2 |
    """

    def text(cell: object) -> str:
        if isinstance(cell, Spread):
            return cell.text()
        return number(cell) if isinstance(cell, float) else str(cell)

    body = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(text, row))} |" for row in body)
