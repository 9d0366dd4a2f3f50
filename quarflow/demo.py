"""A first look, in two minutes on two cores: fits two flows, prints what they are worth, draws what they learnt.

Run as ``make demo``, or ``python -m quarflow.demo --out FOLDER``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import quarflow as qf
from quarflow.data.tabular import load_table, split
from quarflow.data.toy import toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOY = "moons"
TABLE = "breast_cancer"
COLUMNS = ("mean radius", "mean texture", "mean concavity", "mean symmetry")


def compare(name: str, train: Tensor, test: Tensor, flow: qf.Flow, truth: float | None) -> None:
    """Prints held-out nats with standard errors: the flow, a Gaussian mixture, a kernel density."""
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KernelDensity

    scale = train.std(0)
    x, held_out = (train / scale).numpy(), (test / scale).numpy()
    # Both peers are given their best setting, by cross-validation on the rows that the flow was given.
    mixture = GridSearchCV(
        GaussianMixture(reg_covar=1e-4, n_init=2, random_state=0), {"n_components": [1, 2, 3, 5, 8, 12, 16]}, cv=3
    ).fit(x)
    kernel = GridSearchCV(KernelDensity(), {"bandwidth": [0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45, 0.6]}, cv=3).fit(x)
    volume = scale.log().sum().item()
    peers = {
        f"Gaussian mixture ({mixture.best_params_['n_components']} components)": mixture.best_estimator_,
        f"kernel density (bandwidth {kernel.best_params_['bandwidth']})": kernel.best_estimator_,
    }
    rows = [("QuAR flow, exact", flow.log_prob(test).detach())]
    rows += [(label, torch.as_tensor(m.score_samples(held_out)) - volume) for label, m in peers.items()]
    print(f"\n{name}: mean log-likelihood of {len(test)} held-out rows, in nats (higher is better)")
    for label, nats in rows:
        print(f"  {label:<36}{nats.mean().item():9.3f} ± {nats.std().item() / len(nats) ** 0.5:.3f}")
    if truth is not None:
        print(f"  {'the true density':<36}{truth:9.3f}")


def draw_toy(flow: qf.Flow, data: Tensor, distribution: Any) -> Figure:
    """Log-density contours of the truth and of the flow, and samples of both."""
    from matplotlib.figure import Figure

    low, high = data.amin(0) - 0.6, data.amax(0) + 0.6
    xs, ys = (torch.linspace(float(a), float(b), 300) for a, b in zip(low, high, strict=True))
    grid = torch.cartesian_prod(xs, ys)
    true = distribution.log_prob(grid.double()).view(300, 300).T
    with torch.no_grad():
        learnt = flow.log_prob(grid).view(300, 300).T
    figure = Figure(figsize=(10, 6.4), layout="constrained", dpi=110)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    top = float(true.max())
    levels = torch.linspace(top - 12, top, 19).tolist()
    for ax, density, title in zip(axes[0], (true, learnt), ("true log-density", "QuAR flow, exact"), strict=True):
        shades = ax.contourf(xs, ys, density.clamp(levels[0], levels[-1]), levels, cmap="viridis")
        ax.contour(xs, ys, density, levels[::3], colors="white", linewidths=0.4, linestyles="solid", alpha=0.6)
        ax.set_title(title)
    figure.colorbar(shades, ax=axes[0], label="nats", shrink=0.9)
    samples = flow.sample(2000)
    for ax, points, title in zip(axes[1], (data[:2000], samples), ("data", "samples of the flow"), strict=True):
        ax.plot(*points.T, ".", ms=2, color="#1f4e8c", alpha=0.5)
        ax.set_title(title)
    for ax in axes.flat:
        ax.set_xlim(xs[0], xs[-1])
        ax.set_ylim(ys[0], ys[-1])
    return figure


def draw_table(flow: qf.Flow, data: Tensor, columns: tuple[str, ...]) -> Figure:
    """Every pair of columns, data against as many samples; marginals on the diagonal."""
    from matplotlib.figure import Figure

    samples, many = flow.sample(len(data)), flow.sample(5000)
    n = len(columns)
    figure = Figure(figsize=(2.3 * n, 2.2 * n), layout="constrained", dpi=100)
    axes = figure.subplots(n, n)
    for i in range(n):
        for j in range(n):
            ax = axes[i, j]
            if i == j:
                bins = torch.linspace(float(data[:, i].min()), float(data[:, i].max()), 21).tolist()
                ax.hist(data[:, i], bins, color="#1f4e8c", alpha=0.5, density=True, label="data")
                ax.hist(many[:, i], bins, color="#d1602c", histtype="step", density=True, lw=1.5, label="flow")
                ax.set_yticks([])
            else:
                points, color = (data, "#1f4e8c") if i > j else (samples, "#d1602c")
                ax.plot(points[:, j], points[:, i], ".", ms=3, color=color, alpha=0.7)
                ax.set_xlim(float(data[:, j].min()), float(data[:, j].max()))
                ax.set_ylim(float(data[:, i].min()), float(data[:, i].max()))
            if i == n - 1:
                ax.set_xlabel(columns[j])
            if j == 0:
                ax.set_ylabel(columns[i])
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{TABLE}: data below the diagonal, samples of the flow above it")
    return figure


def main() -> None:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(prog="python -m quarflow.demo", description="Fits two flows and draws them.")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the pictures (default: demo)")
    parser.add_argument("--steps", type=int, default=1200, help="training steps of the toy (default: 1200)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: expected an integer >= 1; got {arguments.steps}")
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    distribution = toy(TOY)
    generator = torch.Generator().manual_seed(0)
    train, test = distribution.sample(10_000, generator), distribution.sample(5_000, generator)
    flow = qf.models.quar(features=2, blocks=4, hidden=(16, 16))
    history = qf.fit(flow, train, max_steps=arguments.steps)
    print(history)
    compare(TOY, train, test, flow, truth=distribution.log_prob(test.double()).mean().item())
    pictures = [arguments.out / name for name in (f"{TOY}.png", f"{TOY}_training.png", f"{TABLE}.png")]
    draw_toy(flow, train, distribution).savefig(pictures[0])
    history.plot(pictures[1])

    table = load_table(TABLE)
    x = table.x[:, [table.columns.index(c) for c in COLUMNS]]
    train, validation, test = split(x, 0.15, 0.25, seed=0)
    flow = qf.models.quar(features=len(COLUMNS), blocks=4, hidden=(8, 8), mixing="lu")
    history = qf.fit(
        flow, train, validation=validation, max_steps=min(500, arguments.steps), batch_size=128, learning_rate=5e-3
    )
    print(f"\n{history}")
    compare(TABLE, torch.cat([train, validation]), test, flow, truth=None)
    draw_table(flow, x, COLUMNS).savefig(pictures[2])

    print(f"\nPictures, in {time.monotonic() - started:.0f} s:")
    for path in pictures:
        print(f"  {path}")


if __name__ == "__main__":
    main()
