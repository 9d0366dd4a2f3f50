"""Figures 4, 5 and 6: where the eight modes are after each transform, from the flows of figure 3 (their first seed).

Order reversals are undone in the pictures and in all numbers: a coordinate keeps its axis. A transform here is one of
the 16 flows with the affine one before it; the last is affine.

The paper reads from its pictures that autoregressive flows take "unintuitive" paths with "extreme" transformations,
where residual and QuAR flows are "smooth", and that the former "move the space around" where the latter "reduce the
volume such that the space between data points is removed". Numbers for that:

====================  ============================================================================================
``path``              how far points move in all: the sum over transforms of their root mean square displacement,
                      between clouds that were first standardised, so that affine maps count for nothing
``detour``            ``path`` over the distance from the first cloud to the last: 1 for straight ways
``log_stretch``       99th percentile over points of ``max |log s|``, ``s`` the singular values of a transform's
                      Jacobian without its affine part: 0 for an isometry; in all, the largest of the transforms
``volume_share``      of ``E_data log q - E_gap log q``, the part that is log-determinant: of the volume of gaps that
                      is removed; the rest are gaps moved to where the base density is low
====================  ============================================================================================

Gaps are places between the modes: in the disc through the modes, and outside the densest 95% of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quarflow as qf
from experiments.drawing import COLOURS, canvas, save_png
from experiments.figure3 import DATA
from experiments.synthetic import CELLS, HALF_WIDTH, Job, grid, judge, load, sparse
from quarflow.data.toy import EightGaussians, toy
from quarflow.transforms.base import Chain, Transform
from quarflow.transforms.elementwise import Affine, Standardise
from quarflow.transforms.mixing import Permutation, Reverse

NAME = "figures4-6"
CLAIMS = (
    "Residual and QuAR flows transform the modes smoothly; autoregressive flows take an unintuitive path with some "
    "extreme transformations.",
    "Autoregressive flows move the space around; QuAR and residual flows reduce the volume between data points.",
)
NUMBERS = {"maf": 4, "quar": 5, "residual": 6}  # of the figures in the paper
POINTS = 1600


@dataclass(frozen=True)
class Stage:
    """A cloud of points after a transform: ``x`` (batch, D) with its axes in their place."""

    x: Tensor
    ladj: Tensor  # of the transform, (batch,)
    log_stretch: float  # of the transform without its affine part


def stages(flow: qf.Flow, x: Tensor) -> list[Stage]:
    """The data, and what they are after each transform."""
    found = [Stage(x, x.new_zeros(len(x)), 0.0)]
    axes = list(range(x.shape[1]))  # the column of x in which each coordinate is
    ladj, stretch, moved = x.new_zeros(len(x)), 0.0, False
    steps = flow.transform.steps if isinstance(flow.transform, Chain) else [flow.transform]
    for i, step in enumerate(steps, 1):
        if isinstance(step, Permutation | Reverse):
            order = step(torch.tensor([axes], dtype=x.dtype))[0][0].long().tolist()
            x, axes = step(x)[0], order
            continue
        own = not isinstance(step, Affine | Standardise)
        if own:
            stretch = log_stretch(step, x)
        with torch.no_grad():
            x, part = step(x)
        ladj, moved = ladj + part, True
        if own or i == len(steps):
            places = torch.tensor(axes).argsort()
            found.append(Stage(x[:, places], ladj, stretch))
            ladj, stretch, moved = torch.zeros_like(ladj), 0.0, False
    if moved:
        found.append(Stage(x[:, torch.tensor(axes).argsort()], ladj, stretch))
    return found


def log_stretch(step: Transform, x: Tensor) -> float:
    """99th percentile over ``x`` of the largest ``|log s|``, ``s`` the singular values of the Jacobian.

    >>> round(log_stretch(Affine(2).double(), torch.randn(5, 2, dtype=torch.float64)), 6)
    0.0
    """
    x = x.detach().requires_grad_()
    z = step(x)[0]
    rows = [torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0] for i in range(x.shape[1])]
    values = torch.linalg.svdvals(torch.stack(rows, 1))
    return torch.quantile(values.log().abs().amax(1), 0.99).item()


def numbers(flow: qf.Flow, clouds: Sequence[Stage], gaps: Tensor) -> dict[str, Any]:
    """What the module says, in all and for each transform."""
    shapes = [(stage.x - stage.x.mean(0)) / stage.x.std(0) for stage in clouds]

    def distance(a: Tensor, b: Tensor) -> float:
        return (a - b).square().sum(1).mean().sqrt().item()

    moves = [distance(a, b) for a, b in pairwise(shapes)]
    with torch.no_grad():
        (z, ladj), (z_gap, ladj_gap) = flow.transform(clouds[0].x), flow.transform(gaps)
        volume = (ladj.mean() - ladj_gap.mean()).item()
        place = (flow.base.log_prob(z).mean() - flow.base.log_prob(z_gap).mean()).item()
    return {
        "path": sum(moves),
        "detour": sum(moves) / distance(shapes[0], shapes[-1]),
        "log_stretch": max(stage.log_stretch for stage in clouds),
        "largest_move": max(moves),
        "volume_share": volume / (volume + place),
        "transforms": [
            {
                "log_det": stage.ladj.mean().item(),
                "log_det_sd": stage.ladj.std().item(),
                "log_stretch": stage.log_stretch,
                "move": move,
            }
            for stage, move in zip(clouds[1:], moves, strict=True)
        ],
    }


def points() -> tuple[Tensor, Tensor]:
    """Data and the mode of each: (n, 2), (n,)."""
    truth = EightGaussians()
    x = truth.sample(POINTS, torch.Generator().manual_seed(2**40), torch.float64)
    return x, torch.cdist(x, truth.means).argmin(1)


def between() -> Tensor:
    """Midpoints of cells in the gaps: (n, 2)."""
    x, truth = grid(HALF_WIDTH, CELLS), EightGaussians()
    radius = truth.means[0].norm()
    return x[sparse(toy(DATA).log_prob(x), (2 * HALF_WIDTH / CELLS) ** 2) & (x.norm(dim=1) <= radius)]


def picture(job: Job) -> str:
    """The name of the picture of a model."""
    return f"figure{NUMBERS[job.name]}.png" if job.name in NUMBERS else f"{NAME}-{job.name.replace(':', '-')}.png"


def results(jobs: Sequence[Job], runs: Path, out: Path) -> dict[str, Any]:
    """The numbers of the figures; and their pictures."""
    (x, modes), gaps, found = points(), between(), {}
    for job in jobs:
        flow = judge(load(job, runs))
        clouds = stages(flow, x)
        found[job.name] = {"picture": picture(job), **numbers(flow, clouds, gaps)}
        draw(clouds, modes, job.model.label, out / picture(job))
    return {"models": found}


def draw(clouds: Sequence[Stage], modes: Tensor, label: str, path: Path) -> None:
    """A panel for each cloud, a colour for each mode."""
    columns = 6
    rows = -(-len(clouds) // columns)
    figure = canvas(1.2 * columns, 1.33 * rows + 0.25)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    order = torch.randperm(len(modes), generator=torch.Generator().manual_seed(0))  # no mode lies above the others
    colours = [COLOURS[mode] for mode in modes[order]]
    last = len(clouds) - 1
    titles = {0: "data", last: "latent"}
    for i, (place, stage) in enumerate(zip(axes, clouds, strict=False)):
        z = stage.x[order].numpy()
        middle = (z.max(0) + z.min(0)) / 2
        half = 1.08 * (z.max(0) - z.min(0)).max() / 2
        place.scatter(z[:, 0], z[:, 1], s=1.4, c=colours, lw=0, alpha=0.85)
        place.set(aspect="equal", xticks=(), yticks=())
        place.set_xlim(middle[0] - half, middle[0] + half)
        place.set_ylim(middle[1] - half, middle[1] + half)
        place.spines[:].set(color="#c8c8c8", lw=0.6)
        place.set_title(titles.get(i, str(i)), fontsize=7.5, pad=2)
    for place in axes[len(clouds) :]:
        place.set_axis_off()
    figure.suptitle(label, fontsize=9)
    save_png(figure, path)
