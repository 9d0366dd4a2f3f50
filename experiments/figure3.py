"""Figure 3: contours of the log-density of eight Gaussians in the plane under three kinds of flow.

16 flows each with affine transforms between, ELU. The residual flow has layers 2-128-128-2, QuAR 64 units for each
of two coordinates in each layer, and the autoregressive flow, whose second coordinate is scaled and shifted by what a
network 1-128-128-2 makes of the first, Adamax in place of Adam. Between its flows, and between QuAR's, the order of
the coordinates is reversed: in one order the first coordinate of an affine autoregressive flow would stay Gaussian.
The residual flow needs no order. Norms of layers are bounded from above by Gram iteration. In the plane the residual
flow's log-determinants can be exact, from whole Jacobians, and are, in training too: the published estimates (2 exact
terms and Poisson(2) more) have no finite variance at norms near 1, and a flow that trains on them learns to look better
than it is (``roulette``, which ``--also`` adds).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.drawing import canvas, save_png
from experiments.synthetic import Job, Model, grid, judge, load, log_density, summary
from quarflow.data.toy import toy
from quarflow.models import REGISTRY

NAME = "figure3"
DATA = "eight_gaussians"
CLAIM = "The contours match the data better in sparse regions than those of the autoregressive flow."
BLOCKS = 16
QUAR: dict[str, Any] = {"model": "quar", "features": 2, "blocks": BLOCKS, "hidden": (64, 64), "mixing": "reverse"}
DENSE: dict[str, Any] = {"features": 2, "blocks": BLOCKS, "hidden": (128, 128), "activation": "elu"}
MODELS = {
    "maf": Model("Autoregressive", {"model": "maf", **DENSE, "mixing": "reverse"}, optimizer="adamax"),
    "residual": Model("Residual", {"model": "residual", **DENSE, "mixing": None, "logdet": "full"}),
    "quar": Model("QuAR", {**QUAR, "activation": "elu", "lipschitz": "network"}),
    "quar-coordinate": Model("QuAR, our defaults", {**QUAR, "activation": "wave", "lipschitz": "coordinate"}),
}
# Others, of the same depth and width where they have these.
ROULETTE = Model("Residual, on estimates", {"model": "residual", **DENSE, "mixing": None, "sigma": 0.98**3})
OTHERS: dict[str, dict[str, Any]] = {
    "iaf": DENSE,
    "nice": DENSE,
    "realnvp": DENSE,
    "bnaf": {"blocks": BLOCKS, "hidden": (64, 64)},
    "planar": {"blocks": 2 * BLOCKS},
    "radial": {"blocks": 2 * BLOCKS},
    "sylvester": {"blocks": BLOCKS},
}
ZUKO = "zuko:"


def also(name: str) -> Model:
    """Another model: its name in `quarflow.models.REGISTRY`, ``zuko:NAME`` for one of zuko's, or ``roulette``.

    >>> also("nice").label
    'nice'
    """
    if name == "roulette":
        return ROULETTE
    if name in REGISTRY and "features" in {f.name for f in dataclasses.fields(REGISTRY[name])}:
        return Model(name, {"model": name, "features": 2, **OTHERS.get(name, {})})
    if name.startswith(ZUKO):
        kind = name.removeprefix(ZUKO)
        try:
            import zuko
        except ImportError as error:
            raise ValueError(f"{name} needs zuko: pip install 'quarflow[zuko]'") from error
        if isinstance(getattr(zuko.flows, kind, None), type) and kind != "Flow":
            return Model(f"zuko's {kind}", {"model": name, "features": 2, "hidden_features": (128, 128)})
    known = ", ".join(sorted(n for n in REGISTRY if n in OTHERS))
    raise ValueError(f"there is no model {name!r}; there are {known}, roulette, and zuko:NSF and others of zuko's")


def results(runs: Mapping[str, Sequence[Mapping[str, Any]]], step_ms: Mapping[str, float]) -> dict[str, Any]:
    """The numbers of the figure."""
    entropy, error = toy(DATA).entropy(1_000_000)
    first = next(iter(runs.values()))[0]
    found: dict[str, Any] = {
        "true_nats": first["true_nats"],
        "entropy_nats": entropy,
        "entropy_nats_se": error,
        "models": {},
    }
    for name, each in runs.items():
        found["models"][name] = {
            **{key: each[0][key] for key in ("parameters", "live_parameters")},
            "step_ms": step_ms[name],
            **summary(each),
            "seeds": [{key: run[key] for key in ("seed", "test_nats", "sparse_kl")} for run in each],
        }
    return found


def draw(jobs: Sequence[Job], runs: Path, found: Mapping[str, Any], path: Path) -> None:
    """Log-densities of the data and of each model (its first seed), with the same levels."""
    import numpy as np

    half, cells = 4.5, 180
    x = grid(half, cells)
    ticks = x[:cells, 1].numpy()
    panels = [("Data", toy(DATA).log_prob(x))]
    panels += [(job.model.label, log_density(judge(load(job, runs)), x)) for job in jobs if job.seed == 0]
    figure = canvas(2.05 * len(panels) + 0.5, 2.45)
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    levels = np.arange(-44.0, 0.0, 2.0)
    for place, (label, log_q) in zip(axes, panels, strict=True):
        z = log_q.view(cells, cells).T.numpy()
        filled = place.contourf(ticks, ticks, z, levels=levels, cmap="viridis", extend="both")
        place.contour(ticks, ticks, z, levels=levels, colors="white", linewidths=0.35, alpha=0.55, linestyles="solid")
        place.set_title(label, fontsize=9)
        place.set(aspect="equal", xticks=(-4, 0, 4), yticks=(-4, 0, 4))
        place.tick_params(labelsize=7)
    bar = figure.colorbar(filled, ax=axes, pad=0.01, shrink=0.9, aspect=18, ticks=[-40, -30, -20, -10, -2])
    bar.set_label("log-density (nats)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    save_png(figure, path)
