"""All benchmarks but the `LONG` ones, in turn, then the tables and picture of README.md: ``python -m benchmarks``.

``python -m benchmarks --tables`` only writes the tables, from the results that are there.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import speed
from benchmarks.harness import RESULTS, ROOT, load

NAMES = (
    "import_time",
    "vectors_cpu",
    "residual_cost",
    "inverse",
    "scaling",
    "states",
    "scoring",
    "defaults",
    "tabular",
    "outliers",
    "shares",
)
LONG = ("defaults", "tabular", "outliers", "shares")  # up to hours, and files that the repository does not hold
ON_A_GPU = ("table2", "vectors", "growth")
README = Path(__file__).resolve().parent / "README.md"
MARK = "<!-- tables: written by `python -m benchmarks --tables` -->"


def tables() -> str:
    """The tables of every committed result, each under where and when it was measured."""
    parts = []
    for name in (*NAMES, *ON_A_GPU):
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = load(path)
            shown: str = importlib.import_module(f"benchmarks.{name}").show(result)
            parts.append(f"### {name}\n{provenance(result)}\n\n{shown}")
    if (RESULTS / speed.NAME).exists():
        parts.append(f"![costs on a GPU](results/{speed.NAME})")
    return "\n\n".join(parts)


def with_tables(readme: str) -> str:
    """The text of the README, with the tables of the results behind the mark."""
    return f"{readme.partition(MARK)[0]}{MARK}\n\n{tables()}\n"


def provenance(result: dict[str, Any]) -> str:
    """One line: hardware, versions, date and commit."""
    versions = {"Python": result["python"], "torch": result["torch"], **result["packages"]}
    gpu = f"{result['gpu']}; " if result.get("gpu") else ""
    return (
        f"{gpu}{result['cpu']}, {result['threads']} thread{'s' * (result['threads'] > 1)} on {result['cores']} cores "
        f"(load {result['load']}); "
        f"{', '.join(f'{name} {v}' for name, v in versions.items())}; "
        f"{result['date']}; commit `{result['commit']}`"
    )


def main() -> None:
    """Runs each benchmark in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    if not parser.parse_args().tables:
        for name in (*NAMES, *ON_A_GPU) if torch.cuda.is_available() else NAMES:
            if name in LONG:
                continue
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=True)
    speed.draw(RESULTS)
    README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
