"""Outliers by their density: `FlowDensity` against scikit-learn's detectors on the ten sets of ADBench.

Every model is fitted to the same half of the inliers and ranks the other half and all outliers, three times with other
halves. Nobody sees an outlier before that: the number of components of the mixture is chosen on a fifth of its training
rows. What needs columns of one scale gets them standardised. `FlowDensity` and the others have their defaults. A result
is written after each model, and a run that was cut goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import quarflow as qf
from benchmarks.harness import load, save, start, table
from benchmarks.lanes import side_by_side
from benchmarks.tabular import file

PACKAGES = ("scikit-learn",)
# The ones that take longest first, for lanes that end together.
FILES = ("32_shuttle", "26_optdigits", "30_satellite", "28_pendigits", "23_mammography", "38_thyroid")
FILES += ("6_cardio", "18_Ionosphere", "4_breastw", "45_wine")
SETS = {name.split("_")[1]: f"{name}.npz" for name in FILES}
SECONDS = 60  # that no job should exceed
FIGURES = {"auc": ("ROC AUC", 3), "average_precision": ("average precision", 3), "seconds": ("seconds", 1)}
Scores = Callable[[np.ndarray], np.ndarray]


def flow(x: np.ndarray, seed: int, **options: Any) -> Scores:
    """`FlowDensity` as it comes, or with ``options``; rows that it holds for impossible are the most surprising."""
    model = qf.FlowDensity(random_state=seed, **options).fit(x)
    return lambda new: np.maximum(model.score_samples(new), -np.finfo(float).max)


def forest(x: np.ndarray, seed: int) -> Scores:
    """An isolation forest; it asks for no scale."""
    from sklearn.ensemble import IsolationForest

    return IsolationForest(random_state=seed).fit(x).score_samples


def standardised(make: Callable[[], Any], x: np.ndarray, seed: int) -> Scores:
    """A detector behind a `StandardScaler`."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), make()).fit(x).score_samples  # type: ignore[no-any-return]


def factor() -> Any:
    """Local outlier factor, for new rows."""
    from sklearn.neighbors import LocalOutlierFactor

    return LocalOutlierFactor(novelty=True)


def machine() -> Any:
    """One-class support vectors with radial kernels."""
    from sklearn.svm import OneClassSVM

    return OneClassSVM()


def mixture(x: np.ndarray, seed: int) -> Scores:
    """Gaussians with full covariances: 1, 2, 4 .. of them while that helps a fifth of the rows; then with all rows."""
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import train_test_split

    train, held_out = train_test_split(x, test_size=0.2, random_state=seed)

    def fitted(components: int, rows: np.ndarray) -> Any:
        return standardised(lambda: GaussianMixture(components, reg_covar=1e-5, random_state=seed), rows, seed)

    nats, components = fitted(1, train)(held_out).mean(), 1
    while 4 * components < len(train):
        if (better := fitted(2 * components, train)(held_out).mean()) <= nats:
            break
        nats, components = better, 2 * components
    return fitted(components, x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[np.ndarray, int], Scores]] = {
    "FlowDensity": flow,
    "isolation forest": forest,
    "local outlier factor": partial(standardised, factor),
    "one-class SVM": partial(standardised, machine),
    "Gaussian mixture": mixture,
}


def halves(x: np.ndarray, y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Half of the inliers to train on; the other half and all outliers; which of these are outliers.

    >>> train, test, labels = halves(np.arange(5.0)[:, None], np.array([0, 0, 0, 0, 1]), seed=0)
    >>> len(train), sorted([*train[:, 0], *test[:, 0]]), labels
    (2, [0.0, 1.0, 2.0, 3.0, 4.0], array([0, 0, 1]))
    """
    order = np.random.default_rng(seed).permutation(np.flatnonzero(y == 0))
    train, test = np.split(order, [len(order) // 2])
    test = np.concatenate([test, np.flatnonzero(y)])
    return x[train], x[test], y[test]


def made(rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """A parabola with a whole number beside it, and outliers in its bow: for a quick look."""
    rng = np.random.default_rng(0)
    y = (np.arange(rows) < rows // 10).astype(int)
    x = rng.uniform(-1.5, 1.5, rows) * np.where(y, 0.5, 1)
    height = np.where(y, 1.5, x**2) + rng.normal(0, 0.1, rows)
    return np.stack([x, height, rng.poisson(3, rows)], 1), y


def measure(job: tuple[str, str, int], folder: Path) -> dict[str, Any]:
    """One fit and its figures."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    name, model, seed = job
    if name == "made":
        x, y = made()
    else:
        found = np.load(file(folder, SETS[name]))
        x, y = found["X"].astype(float), found["y"].astype(int)
    train, test, labels = halves(x, y, seed)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant columns, and of rows that are impossible
        scores = MODELS[model](train, seed)(test)
    row = {"data": name, "model": model, "seed": seed, "rows": len(train), "features": train.shape[1]}
    row |= {"auc": roc_auc_score(labels, -scores), "average_precision": average_precision_score(labels, -scores)}
    return row | {"seconds": time.monotonic() - began}


def means(rows: Sequence[dict[str, Any]], figure: str) -> dict[tuple[str, str], float]:
    """Of a figure over seeds, by set and model; those of ``"mean"`` are over the sets that all models have.

    >>> rows = [{"data": "a", "model": "m", "auc": 0.5}, {"data": "a", "model": "m", "auc": 1.0}]
    >>> means(rows, "auc")
    {('a', 'm'): 0.75, ('mean', 'm'): 0.75}
    """
    by: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        by.setdefault((row["data"], row["model"]), []).append(row[figure])
    found = {key: statistics.mean(values) for key, values in by.items()}
    models = dict.fromkeys(model for _, model in found)
    whole = [name for name in dict.fromkeys(name for name, _ in found) if all((name, m) in found for m in models)]
    if whole:
        found |= {("mean", model): statistics.mean(found[name, model] for name in whole) for model in models}
    return found


def show(result: dict[str, Any]) -> str:
    """A table of each figure, sets by models, in Markdown; the best of a row is bold."""
    models = [m for m in MODELS if any(row["model"] == m for row in result["rows"])]
    parts = []
    for figure, (title, digits) in FIGURES.items():
        found = means(result["rows"], figure)
        body = []
        for name in [n for n in (*SETS, "made", "mean") if (n, models[0]) in found]:
            texts = [f"{found[name, m]:.{digits}f}" if (name, m) in found else "" for m in models]
            best = "" if figure == "seconds" else max(texts)
            body.append([name, *(f"**{text}**" if text == best else text for text in texts)])
        parts.append(table([title, *models], body))
    return "\n\n".join(parts)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """The options that other benchmarks do not have."""
    folder = os.environ.get("QUARFLOW_TABLES", ".")
    parser.add_argument("--data", type=Path, default=Path(folder), help="folder of the sets (QUARFLOW_TABLES)")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lanes", type=int, default=1, help="jobs side by side, each on a core of its own")
    parser.add_argument("--minutes", type=float, default=math.inf, help="by when to end; the same command goes on")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves after each fit, and prints."""
    options = start(__doc__, arguments, arguments_of)
    if options.quick:
        options.sets, options.seeds = ["made"], 1
    path = options.out / "outliers.json"
    rows = load(path)["rows"] if path.exists() else []
    known = {(row["data"], row["model"], row["seed"]) for row in rows}
    jobs = [(n, m, s) for s in range(options.seeds) for n in options.sets for m in options.models]
    jobs = [job for job in jobs if job not in known]
    work = partial(measure, folder=options.data)
    for _, row in side_by_side(work, jobs, options.lanes, 1, SECONDS, options.minutes):
        rows.append(row)
        print("{data}, {model}, {seed}: {auc:.3f}, {average_precision:.3f}, {seconds:.0f} s".format(**row), flush=True)
        save(options, "outliers", {"seeds": options.seeds}, rows, PACKAGES)
    print(show(load(path)))


if __name__ == "__main__":
    main()
