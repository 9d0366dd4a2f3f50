"""What an exact log-determinant saves: QuAR against residual flows, ours and normflows', of the same network size.

One CPU thread, one run, three blocks of two hidden layers with the same number of units: a QuAR network has ``k``
units for each of D coordinates, a residual one ``D k``. QuAR has its defaults, or the paper's form (ELU, a
contraction); our residual flow has ELU and certified norms. Residual flows train on estimates, ours with 2 exact terms
and Poisson(2) more, and evaluate with 20 exact terms or more, as the paper has it; normflows needs none for two
coordinates. All are trained for a while on a mixture of eight Gaussians before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import load, save, start
from benchmarks.vectors_cpu import TRANSFORMS, Contestant, Settings, measure, normflows_residual, ours
from benchmarks.vectors_cpu import show as tables
from quarflow.models import quar, residual

REFERENCE = "QuAR"
HIDDEN = ((2, (64, 64)), (20, (6, 6)), (20, (24, 24)))  # coordinates, and units for each of them


def contestants(d: int, hidden: tuple[int, ...]) -> dict[str, Contestant]:
    """All of them, with the same units in each layer."""
    wide = tuple(d * k for k in hidden)
    paper = {"activation": "elu", "lipschitz": "network"}
    return {
        REFERENCE: ours(quar(d, blocks=TRANSFORMS, hidden=hidden), hidden),
        "QuAR, ELU, contraction": ours(quar(d, blocks=TRANSFORMS, hidden=hidden, **paper), hidden),
        "our residual flow": ours(residual(d, blocks=TRANSFORMS, hidden=wide, activation="elu"), wide),
        "normflows residual": normflows_residual(d, True, wide[0]),
    }


def show(result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown."""
    return tables(result, REFERENCE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    settings = Settings(HIDDEN, rounds=40)
    if options.quick:
        settings = Settings(((2, (8, 8)),), batch=16, rows=8, steps=3, rounds=3, sampling_rounds=2)
    found = [measure(d, contestants(d, hidden), REFERENCE, settings) for d, hidden in settings.hidden]
    rows = [row for each in found for row in each]
    path = save(options, "residual_cost", vars(settings), rows, ["normflows"])
    print(show(load(path)))


if __name__ == "__main__":
    main()
