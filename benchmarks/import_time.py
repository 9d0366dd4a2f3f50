"""How much longer ``import quarflow`` takes than ``import torch``.

Each import is timed inside a fresh interpreter, without the start of the interpreter itself; the two take
turns. Also recorded: which packages ``import quarflow`` loads that ``import torch`` does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import ROOT, Spread, interleave, load, ratio, save, start, table

CLOCK = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
LOADED = """
import sys, json, torch
before = set(sys.modules)
import quarflow
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(added - sys.stdlib_module_names - {"quarflow", "torch"})))
"""


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def seconds(package: str) -> Callable[[], float]:
    """The seconds of ``import package`` in a new interpreter."""
    return lambda: float(fresh(CLOCK.format(package)))


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    body = [[row["import"], row["milliseconds"], row["ratio"]] for row in result["rows"]]
    others = ", ".join(result["loaded"]) or "none"
    return table(["import", "ms", "/ torch"], body) + f"\n\nPackages loaded besides torch's: {others}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    rounds, warmup = (1, 0) if options.quick else (25, 2)
    found = interleave({name: seconds(name) for name in ("torch", "quarflow")}, rounds, warmup)
    rows = [
        {
            "import": name,
            "milliseconds": Spread.of([1e3 * t for t in times]),
            "ratio": ratio(times, found["torch"]),
        }
        for name, times in found.items()
    ]
    path = save(options, "import_time", {"rounds": rounds}, rows, loaded=json.loads(fresh(LOADED)))
    print(show(load(path)))


if __name__ == "__main__":
    main()
