"""Newton, Banach and bracketing as solvers of ``x + F(x) = z`` on trained flows.

Flows are trained in float32 with `quarflow.fit`, on eight Gaussians in two dimensions and on a mixture of
eight in twenty. Then 1000 rows of held-out data go to noise and back, in float32 and in float64, with the
same weights. Evaluations are of a block's network, for the whole batch: the slowest row decides. The
residual is the largest ``|x + F(x) - z|`` over rows and blocks; the round trip error holds what rounding in
the forward pass and in the other layers adds. Rows that a solver gave up on are counted, not raised.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import quarflow as qf
from benchmarks.harness import Spread, interleave, load, save, start, table, timed
from quarflow.data.toy import EightGaussians, mixture_of_gaussians
from quarflow.models import QuarConfig
from quarflow.nn.bounds import LIPSCHITZ
from quarflow.solvers import SOLVERS, Network, Solution, Solver
from quarflow.transforms import Residual

DATA = {"eight Gaussians, d = 2": EightGaussians, "mixture, d = 20": lambda: mixture_of_gaussians(20)}
HIDDEN = {2: (32, 32), 20: (6, 6)}


@dataclass(frozen=True)
class Settings:
    """Sizes of the run."""

    data: tuple[str, ...] = tuple(DATA)
    lipschitz: tuple[str, ...] = LIPSCHITZ
    activations: tuple[str, ...] = tuple(dict.fromkeys((QuarConfig.activation, "sine", "elu")))
    blocks: int = 6
    steps: int = 400
    rows: int = 1000
    rounds: int = 3


class Recorder:
    """A solver that keeps what ``solver`` found, and lets rows that failed pass."""

    advice = ""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.found: list[Solution] = []

    def __call__(self, net: Network, z: Tensor, sigma: float) -> Solution:
        self.found.append(self.solver(net, z, sigma))
        return dataclasses.replace(self.found[-1], converged=torch.ones_like(self.found[-1].converged))


def invert(flow: qf.Flow, z: Tensor, solver: Solver) -> tuple[Tensor, list[Solution]]:
    """The inverse of the whole flow, and the solution of each residual block."""
    recorder = Recorder(solver)
    for part in flow.modules():
        if isinstance(part, Residual):
            part.solver = recorder
    with qf.solvers.unchecked():  # the error is reported, not judged
        x, _ = flow.transform.inverse(z)
    return x, recorder.found


def trained(data: str, lipschitz: str, activation: str, settings: Settings) -> tuple[qf.Flow, Tensor]:
    """A flow in float32, and rows that it has not seen."""
    density = DATA[data]()
    torch.manual_seed(0)
    x = density.sample(20_000 + settings.rows).float()
    d = x.shape[1]
    options = {"blocks": settings.blocks, "hidden": HIDDEN[d], "lipschitz": lipschitz}
    flow = qf.models.quar(d, 0, activation=activation, **options)
    qf.fit(flow, x[: -settings.rows], max_steps=settings.steps, progress=False)
    return flow, x[-settings.rows :]


def finite(value: Tensor) -> float | None:
    """A number, or None for NaN and inf, which JSON cannot hold.

    >>> finite(torch.tensor(0.5)), finite(torch.tensor(torch.inf))
    (0.5, None)
    """
    return value.item() if bool(torch.isfinite(value)) else None


@torch.no_grad()
def measure(data: str, lipschitz: str, activation: str, settings: Settings) -> list[dict[str, Any]]:
    """A row of results for each dtype and solver, on one trained flow."""
    with torch.enable_grad():
        flow, x = trained(data, lipschitz, activation, settings)
    nats = qf.evaluate(flow, x).nats
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.float64):
        model, points = copy.deepcopy(flow).to(dtype), x.to(dtype)
        z, _ = model.transform(points)
        inverses = {name: partial(invert, model, z, make()) for name, make in SOLVERS.items()}
        times = interleave({name: timed(call) for name, call in inverses.items()}, settings.rounds, warmup=1)
        for name, call in inverses.items():
            back, solutions = call()
            steps = [s.steps for s in solutions]
            row = {"data": data, "lipschitz": lipschitz, "activation": activation, "nats": nats}
            row |= {"dtype": str(dtype).removeprefix("torch."), "solver": name}
            row |= {"evaluations": statistics.mean(steps), "most_evaluations": max(steps)}
            row["milliseconds"] = Spread.of([1e3 * t for t in times[name]])
            row["residual"] = finite(torch.stack([s.residual for s in solutions]).max())
            row["round_trip"] = finite((back - points).abs().max())
            row["failed"] = int((~torch.stack([s.converged for s in solutions]).all(0)).sum())
            rows.append(row)
    return rows


def show(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown: a line for each flow and dtype, columns for each solver."""
    solvers = list(dict.fromkeys(row["solver"] for row in result["rows"]))
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        lines.setdefault(tuple(row[k] for k in ("data", "lipschitz", "activation", "dtype")), []).append(row)
    head = ["data", "lipschitz", "activation", "dtype"]
    for quantity in ("evaluations, mean (most)", "ms", "residual", "round trip"):
        head += [f"{solver}: {quantity}" for solver in solvers]
    body = [
        [
            *line,
            *(f"{r['evaluations']:.1f} ({r['most_evaluations']})" for r in rows),
            *(r["milliseconds"].median for r in rows),
            *("not finite" if r[k] is None else f"{r[k]:.0e}" for k in ("residual", "round_trip") for r in rows),
        ]
        for line, rows in lines.items()
    ]
    failed = [sum(rows[i]["failed"] for rows in lines.values()) for i in range(len(solvers))]
    notes = f"Rows that failed: {', '.join(f'{s} {n}' for s, n in zip(solvers, failed, strict=True))}."
    return f"{table(head, body)}\n\n{notes}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    settings = Settings()
    if options.quick:
        settings = Settings(tuple(DATA)[:1], ("coordinate",), ("sine",), blocks=2, steps=5, rows=16, rounds=2)
    configurations = itertools.product(settings.data, settings.lipschitz, settings.activations)
    rows = [row for c in configurations for row in measure(*c, settings)]
    path = save(options, "inverse", dataclasses.asdict(settings) | {"hidden": HIDDEN}, rows)
    print(show(load(path)))


if __name__ == "__main__":
    main()
