"""Figure 2: one QuAR block between affine transforms on two uniforms, with and without the Lipschitz Trick.

Layers 1-128-128-128-1 with ELU, as in the appendix of the paper; norms of the layers by Gram iteration, which bounds
them from above. Without the trick each layer is brought to a norm of ``sigma^(1/4)``; with it, the product of their
norms is divided by ``theta + product``: one parameter more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.drawing import COLOURS, canvas, plain, save_png
from experiments.synthetic import Job, Model, judge, load, log_density, mean_and_error, summary
from quarflow.data.toy import toy

NAME = "figure2"
DATA = "two_uniforms"
CLAIM = (
    "The same model with only one additional parameter and flexible Lipschitz constants is better able to model the "
    "complex function."
)
BLOCK: dict[str, Any] = {
    "model": "quar",
    "features": 1,
    "blocks": 1,
    "hidden": (128, 128, 128),
    "activation": "elu",
    "lipschitz": "network",
    "sigma": 0.97,
    "mixing": None,
}
MODELS = {
    "trick": Model("with the Lipschitz Trick", BLOCK),
    "no-trick": Model("without it", {**BLOCK, "trick": False}),
    "paths": Model("with it, and the bound of paths", {**BLOCK, "lipschitz": "coordinate", "bound": "paths"}),
}


def results(runs: Mapping[str, Sequence[Mapping[str, Any]]], step_ms: Mapping[str, float]) -> dict[str, Any]:
    """The numbers of the figure."""
    entropy, _ = toy(DATA).entropy()
    found: dict[str, Any] = {"true_nats": runs["trick"][0]["true_nats"], "entropy_nats": entropy, "models": {}}
    for name, each in runs.items():
        found["models"][name] = {
            "label": MODELS[name].label,
            **{key: each[0][key] for key in ("parameters", "live_parameters")},
            "step_ms": step_ms[name],
            **summary(each),
            "seeds": [{key: run[key] for key in ("seed", "test_nats", "mass_outside")} for run in each],
        }
    with_it, without = runs["trick"], runs["no-trick"]
    gaps = [a["test_nats"] - b["test_nats"] for a, b in zip(with_it, without, strict=True)]
    gap, error = mean_and_error(gaps)
    found["trick"] = {
        "gap_nats": gap,
        "gap_nats_se": error,
        "gaps": gaps,
        "better_in_every_seed": min(gaps) > 0,
        "parameters_added": with_it[0]["parameters"] - without[0]["parameters"],
    }
    return found


def draw(jobs: Sequence[Job], runs: Path, found: Mapping[str, Any], path: Path) -> None:
    """True and learned densities; every seed is a line."""
    figure = canvas(7.4, 3.1)
    density, nats = figure.subplots(1, 2, width_ratios=[3.2, 1])
    x = torch.linspace(-3.1, 3.1, 2401, dtype=torch.float64)[:, None]
    ticks, truth = x[:, 0].numpy(), toy(DATA).log_prob(x).exp().numpy()
    density.fill_between(ticks, truth, color="#dcdcdc", lw=0)
    density.plot(ticks, truth, color="#8a8a8a", lw=1, label="data")
    names = list(found["models"])
    colours = dict(zip(names, COLOURS, strict=False))
    for job in sorted(jobs, key=lambda job: -names.index(job.name)):
        q = log_density(judge(load(job, runs)), x).exp().numpy()
        first = job.seed == 0
        density.plot(
            ticks,
            q,
            color=colours[job.name],
            lw=1.6 if first else 0.6,
            alpha=1 if first else 0.45,
            label=found["models"][job.name]["label"] if first else None,
            zorder=3 if first else 2,
        )
    density.set(xlabel="x", ylabel="density", xlim=(-3.1, 3.1), ylim=(0, None))
    order = ["data", *(found["models"][name]["label"] for name in names)]
    lines = sorted(density.get_legend_handles_labels()[0], key=lambda each: order.index(each.get_label()))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), fontsize=8, frameon=False)
    for i, name in enumerate(names):
        each = [seed["test_nats"] for seed in found["models"][name]["seeds"]]
        nats.plot([i] * len(each), each, "o", color=colours[name], ms=5, alpha=0.7, mew=0)
    nats.axhline(found["true_nats"], color="#8a8a8a", lw=1)
    nats.annotate("true density", (0, found["true_nats"]), (0, -3), textcoords="offset points", va="top", fontsize=8)
    nats.set_xticks(range(len(names)), names, rotation=30, fontsize=8)
    nats.set(ylabel="test log-likelihood (nats)", xlim=(-0.6, len(names) - 0.4))
    for axes in (density, nats):
        plain(axes)
    save_png(figure, path)
