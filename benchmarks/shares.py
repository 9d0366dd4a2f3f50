"""Daily log-returns of 20 shares: learnt to 2014, tested from 2015 on, in nats a day of returns in percent.

Two questions. The density of a day of which nothing is known: QuAR against a Gaussian, a Student t and a Gaussian
mixture. And that of the next day, given all days before: QuAR against Gaussians and Student t with moving covariances,
of exponential weights, or of GARCH variances with dynamic conditional correlations (DCC, Engle 2002). QuAR then sees
returns without the covariance that DCC expects of the day, ``z = C^-1 (r - m)``: what is left is not Gaussian.

Every choice is made in the years to 2014. QuAR is trained without every eighth month of them, which say when to stop,
and which of some settings is best; so do the components of the mixture. All others maximise the likelihood of these
years. At the test no parameter changes; what is conditional hears of each day when it is over.

Then a scenario: the other shares on a day on which one falls by a tenth, by exact draws of a triangular flow, by the
Gaussian, and on the days on which it happened.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quarflow as qf
from benchmarks.harness import load, save, start, table
from benchmarks.tabular import returns
from quarflow.flow import Flow
from quarflow.transforms.base import Chain
from quarflow.transforms.mixing import Whiten

PACKAGES = ("scikit-learn", "scipy")
ONE = "JPM"  # the share that falls
FALL = 0.1
NEAR = (0.08, 0.13)  # falls that are compared with it
DRAWS = 20_000
STYLES: tuple[tuple[dict[str, Any], bool], ...] = (  # of days to 2014, and of those since
    ({"marker": "o", "ls": "", "ms": 4, "color": "#222222", "alpha": 0.55, "mew": 0}, False),
    ({"marker": "D", "ls": "", "ms": 4, "color": "#CC1177", "mew": 0}, True),
)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BASE: dict[str, Any] = {"base": "joint-student"}
SETTINGS: dict[str, dict[str, Any]] = {
    "2 blocks of 4": _BASE | {"blocks": 2, "hidden": (4,)},
    "2 blocks of 8": _BASE | {"blocks": 2, "hidden": (8,)},
    "4 blocks of 4, 4": _BASE | {"blocks": 4, "hidden": (4, 4)},
    "2 conditioned blocks": _BASE | {"block": "conditioned", "blocks": 2, "hidden": (8,), "conditioner": (32,)},
    "2 blocks of 4, normal base": {"blocks": 2, "hidden": (4,)},
}
STEPS = 400


@dataclass(frozen=True)
class Days:
    """Returns in percent (days, shares), the date of each day, and which days are for what."""

    r: np.ndarray
    dates: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Days:
        """The file of 20 shares."""
        dates, r, names = returns(folder)
        return cls(100 * r, dates, names)

    @classmethod
    def made(cls, days: int = 1200) -> Days:
        """Three shares whose common volatility comes and goes, from 2012 on: for a quick look."""
        rng = np.random.default_rng(0)
        volatility = np.exp(0.5 * np.sin(np.arange(days) / 60))
        z = rng.normal(size=(days, 3)) @ np.linalg.cholesky(np.full((3, 3), 0.5) + 0.5 * np.eye(3)).T
        z *= (3 * volatility * np.sqrt(4 / rng.chisquare(4, days)))[:, None]
        dates = np.datetime64("2012-01-01") + np.arange(days)
        return cls(z, dates.astype(str), (ONE, "B", "C"))

    @property
    def known(self) -> np.ndarray:
        """To 2014."""
        return self.dates < "2015"

    @cached_property
    def months(self) -> np.ndarray:
        """The number of the month of each day."""
        return np.unique([date[:7] for date in self.dates], return_inverse=True)[1]

    @property
    def held_out(self) -> np.ndarray:
        """Every eighth month of those known."""
        return self.known & (self.months % 8 == 5)

    @property
    def train(self) -> np.ndarray:
        """The other months of those known."""
        return self.known & ~self.held_out


@dataclass(frozen=True)
class Found:
    """Log-density of every day, with what was chosen for it, and the seconds that this took."""

    nats: np.ndarray
    note: str
    seconds: float = 0.0


# Baselines: a whitening z = C^-1 (r - m) of each day with its log-determinant, and a spherical density of z.


def gaussian(z: np.ndarray, ladj: np.ndarray | float) -> np.ndarray:
    """Log-density of the standard normal, and ``ladj``."""
    return -0.5 * ((z**2).sum(1) + z.shape[1] * math.log(2 * math.pi)) + ladj


def student(z: np.ndarray, ladj: np.ndarray | float, nu: float, scale: float = 1.0) -> np.ndarray:
    """Log-density of the multivariate Student t of that scale, and ``ladj``."""
    d, q = z.shape[1], (z**2).sum(1) / scale**2
    constant = math.lgamma((nu + d) / 2) - math.lgamma(nu / 2) - d / 2 * math.log(nu * math.pi) - d * math.log(scale)
    result: np.ndarray = constant - (nu + d) / 2 * np.log1p(q / nu) + ladj
    return result


def whitened(x: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``C^-1 x`` and ``-log|C|`` of each row, for ``C C^T`` its covariance: one for all, or one for each."""
    lower = np.linalg.cholesky(covariance)
    ladj = -np.log(np.diagonal(lower, axis1=-2, axis2=-1)).sum(-1)
    return np.linalg.solve(np.broadcast_to(lower, (len(x), *lower.shape[-2:])), x[..., None])[..., 0], ladj


def student_by_em(x: np.ndarray, steps: int = 200) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean, scale matrix and degrees of freedom of the multivariate Student t with the greatest likelihood."""
    from scipy.optimize import brentq
    from scipy.special import digamma

    mean, covariance, nu, d = x.mean(0), np.cov(x.T), 8.0, x.shape[1]
    for _ in range(steps):
        z, _ = whitened(x - mean, covariance)
        w = (nu + d) / (nu + (z**2).sum(1))
        mean = w @ x / w.sum()
        covariance = (w[:, None] * (x - mean)).T @ (x - mean) / len(x)
        known = 1 + float((np.log(w) - w).mean() + digamma((nu + d) / 2) - math.log((nu + d) / 2))
        before, nu = nu, brentq(lambda v, k=known: math.log(v / 2) - digamma(v / 2) + k, 0.5, 1e3)
        if abs(nu - before) < 1e-7 * nu:
            break
    return mean, covariance, float(nu)


def decayed(x: np.ndarray, first: np.ndarray, keep: float) -> np.ndarray:
    """``s_t = keep s_(t-1) + x_(t-1)``, from ``first``: what is known before day t."""
    from scipy.signal import lfilter

    result: np.ndarray = lfilter([1.0], [1.0, -keep], np.concatenate([first[None], x[:-1]]), axis=0)
    return result


def products(x: np.ndarray) -> np.ndarray:
    """``x x^T`` of each row."""
    return x[:, :, None] * x[:, None, :]


def garch(x: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The deviation that GARCH(1, 1) expects of each return, its parameters by the Gaussian likelihood of ``known``."""
    from scipy.optimize import minimize

    columns = []
    for e in (x**2).T:
        level = e[known].mean()

        def variances(p: np.ndarray, e: np.ndarray = e, level: float = level) -> np.ndarray:
            a, rest = 0.5 / (1 + np.exp(-p[0])), 1 / (1 + np.exp(p[1]))
            keep = (1 - a) * (1 - rest)
            return decayed((1 - a - keep) * level + a * e, np.asarray(level), keep)

        def loss(p: np.ndarray, e: np.ndarray = e, variances: Any = variances) -> float:
            h = variances(p)[known]
            return float((np.log(h) + e[known] / h).mean())

        columns.append(variances(minimize(loss, [-2.0, 3.0], method="Nelder-Mead", options={"maxiter": 200}).x))
    return np.sqrt(np.stack(columns, 1))


def moving(days: Days) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The whitenings of each kind of moving covariance, by their settings."""
    known, x = days.known, days.r - days.r[days.known].mean(0)
    found: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {"EWMA": {}, "DCC": {}}
    for keep in (0.94, 0.97, 0.98, 0.985, 0.99, 0.995):
        covariance = decayed((1 - keep) * products(x), np.cov(x[known].T), keep)
        found["EWMA"][f"decay {keep}"] = whitened(x, covariance)
    deviation = garch(x, known)
    e = x / deviation
    long = np.cov(e[known].T)
    for a, keep in ((0.003, 0.99), (0.006, 0.985), (0.006, 0.99), (0.006, 0.993), (0.01, 0.98), (0.015, 0.97)):
        q = decayed((1 - a - keep) * long + a * products(e), long, keep)
        scale = np.sqrt(np.diagonal(q, axis1=1, axis2=2))
        z, ladj = whitened(e, q / scale[:, :, None] / scale[:, None, :])
        found["DCC"][f"a = {a}, b = {keep}"] = z, ladj - np.log(deviation).sum(1)
    return found


def baselines(days: Days, filters: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> dict[str, dict[str, Found]]:
    """Log-densities of all models but QuAR, by question."""
    from scipy.optimize import minimize
    from sklearn.mixture import GaussianMixture

    r, known = days.r, days.known
    began = time.monotonic()
    z, ladj = whitened(r - r[known].mean(0), np.cov(r[known].T))
    still = {"Gaussian": Found(gaussian(z, ladj), "", time.monotonic() - began)}
    began = time.monotonic()
    mean, covariance, nu = student_by_em(r[known])
    z, ladj = whitened(r - mean, covariance)
    still["Student t"] = Found(student(z, ladj, nu), f"nu = {nu:.1f}", time.monotonic() - began)
    began, best, components = time.monotonic(), -math.inf, 1
    while 4 * components < days.train.sum():
        make = GaussianMixture(components, reg_covar=1e-4, random_state=0).fit(r[days.train])
        if (nats := make.score(r[days.held_out])) <= best:
            break
        best, components = nats, 2 * components
    components //= 2
    make = GaussianMixture(components, reg_covar=1e-4, random_state=0).fit(r[known])
    seconds = time.monotonic() - began
    still["Gaussian mixture"] = Found(make.score_samples(r), f"{components} components", seconds)

    conditional: dict[str, Found] = {}
    for kind, settings in filters.items():
        found: dict[str, list[Found]] = {"Gaussian": [], "Student t": []}
        for note, (z, ladj) in settings.items():
            found["Gaussian"].append(Found(gaussian(z, ladj), note))
            unit = z[known]

            def loss(p: np.ndarray, unit: np.ndarray = unit) -> float:
                return -float(student(unit, 0.0, 2 + math.exp(p[0]), math.exp(p[1])).mean())

            p = minimize(loss, [1.5, -0.1], method="Nelder-Mead", options={"maxiter": 200}).x
            nu, scale = 2 + math.exp(p[0]), math.exp(p[1])
            found["Student t"].append(Found(student(z, ladj, nu, scale), f"{note}, nu = {nu:.1f}"))
        for name, candidates in found.items():
            conditional[f"{kind} {name}"] = max(candidates, key=lambda f: float(f.nats[known].mean()))
    return {"one day": still, "next day": conditional}


# QuAR.


def trained(z: np.ndarray, days: Days, steps: int, seed: int, **options: Any) -> tuple[Flow, np.ndarray, float]:
    """A QuAR flow behind the Gaussian of its rows, the log-density of all rows, and its mean over those held out."""
    torch.manual_seed(seed)
    x = torch.from_numpy(z).float()
    quar = qf.models.quar(z.shape[1], **options)
    flow = Flow(Chain([Whiten(z.shape[1]), quar.transform]), quar.base)
    held_out = x[torch.from_numpy(days.held_out)]
    train = x[torch.from_numpy(days.train)]
    qf.fit(flow, train, validation=held_out, max_steps=steps, patience=10, seed=seed, progress=False)
    with torch.no_grad():
        nats = flow.eval().log_prob(x).double().numpy()
    return flow, nats, float(nats[days.held_out].mean())


def chosen(z: np.ndarray, days: Days, steps: int) -> str:
    """Of `SETTINGS` the one that is best on the days held out, by its first seed."""
    found = {name: trained(z, days, steps, 0, **setting)[2] for name, setting in SETTINGS.items()}
    for name, nats in found.items():
        print(f"  {name}: {nats:.3f} nats of the days held out", flush=True)
    return max(found, key=lambda name: found[name])


def error_by_months(values: np.ndarray, months: np.ndarray) -> float:
    """Standard error of the mean of days, those of a month taken together."""
    sums = np.bincount(months - months.min(), values - values.mean())
    return float(np.sqrt((sums**2).sum()) / len(values))


def row(
    question: str, model: str, days: Days, found: Sequence[Found], best: np.ndarray | None = None
) -> dict[str, Any]:
    """Figures of a model, over its seeds; with ``best``, the nats of each day of another, by how much it is better."""
    test = ~days.known
    nats = [float(f.nats[test].mean()) for f in found]
    mean = np.mean([f.nats for f in found], 0)[test]
    result = {"question": question, "model": model, "note": found[0].note, "test_nats": statistics.mean(nats)}
    result |= {"test_nats_se": statistics.stdev(nats) / len(nats) ** 0.5 if len(nats) > 1 else None, "nats": nats}
    result |= {"known_nats": float(np.mean([f.nats[days.known].mean() for f in found]))}
    result |= {"seconds": statistics.mean(f.seconds for f in found)}
    if best is not None:
        result |= {"better": float((mean - best[test]).mean())}
        result |= {"better_se": error_by_months(mean - best[test], days.months[test])}
    return result


def measure(days: Days, steps: int, seeds: int) -> tuple[list[dict[str, Any]], str]:
    """Rows of all models, and the setting that QuAR has for a day of which nothing is known."""
    filters = moving(days)
    others = baselines(days, filters)
    z, ladj = max(filters["DCC"].values(), key=lambda f: float(gaussian(*f)[days.known].mean()))
    rows, settings = [], {}
    for question, seen, shift in (("one day", days.r, np.zeros(len(days.r))), ("next day", z, ladj)):
        found = others[question]
        best = max(found.values(), key=lambda f: float(f.nats[~days.known].mean()))
        print(f"{question}: QuAR", flush=True)
        settings[question] = chosen(seen, days, steps)
        quar = []
        for seed in range(seeds):
            began = time.monotonic()
            nats = trained(seen, days, steps, seed, **SETTINGS[settings[question]])[1] + shift
            quar.append(Found(nats, settings[question], time.monotonic() - began))
        rows.append(row(question, "QuAR" if question == "one day" else "QuAR behind DCC", days, quar, best.nats))
        rows += [row(question, name, days, [f]) for name, f in found.items()]
    return rows, settings["one day"]


def scenario(days: Days, setting: str, steps: int, draws: int) -> dict[str, Any]:
    """The other shares, given that `ONE` falls by `FALL`: quantiles by QuAR and by the Gaussian, and what happened."""
    first = days.names.index(ONE)
    order = [first, *(i for i in range(len(days.names)) if i != first)]
    r, known = days.r[:, order], days.known
    flow, nats, _ = trained(r, days, steps, 0, **SETTINGS[setting] | {"mixing": None})
    given = 100 * math.log(1 - FALL)
    drawn = flow.sample_given(draws, torch.tensor([given]), generator=torch.Generator().manual_seed(0))[:, 1:].numpy()
    mean, covariance = r[known].mean(0), np.cov(r[known].T)
    slope = covariance[1:, 0] / covariance[0, 0]
    rest = covariance[1:, 1:] - np.outer(slope, covariance[0, 1:])
    rng = np.random.default_rng(0)
    normal = rng.multivariate_normal(mean[1:] + slope * (given - mean[0]), rest, draws)
    low, high = (100 * math.log(1 - fall) for fall in reversed(NEAR))
    near = (r[:, 0] > low) & (r[:, 0] < high)
    # log p(the others | this one), on the days on which it fell like that.
    x = torch.from_numpy(r).float()
    with torch.no_grad():
        conditional = nats - flow.prefix_log_prob(x[:, :1]).double().numpy()
    z, ladj = whitened(r - mean, covariance)
    z_one, ladj_one = whitened(r[:, :1] - mean[:1], covariance[:1, :1])
    conditional_normal = gaussian(z, ladj) - gaussian(z_one, ladj_one)
    shares = [
        {
            "share": days.names[order[i + 1]],
            "QuAR": np.quantile(drawn[:, i], QUANTILES).tolist(),
            "Gaussian": np.quantile(normal[:, i], QUANTILES).tolist(),
            "happened": r[near, i + 1].tolist(),
        }
        for i in range(r.shape[1] - 1)
    ]
    edges = np.linspace(-20, 10, 61)
    means = {name: values.mean(1) for name, values in (("QuAR", drawn), ("Gaussian", normal))}
    return {
        "one": ONE,
        "fall": FALL,
        "near": list(NEAR),
        "quantiles": list(QUANTILES),
        "test_nats": float(nats[~known].mean()),
        "days": [{"date": str(d), "test": bool(t)} for d, t in zip(days.dates[near], ~known[near], strict=True)],
        "shares": shares,
        "nats_near": {"QuAR": float(conditional[near].mean()), "Gaussian": float(conditional_normal[near].mean())}
        if near.any()
        else {},
        "mean": {
            "edges": edges.tolist(),
            "happened": r[near, 1:].mean(1).tolist(),
            **{name: np.histogram(v, edges, density=True)[0].tolist() for name, v in means.items()},
        },
        "mean_quantiles": {name: np.quantile(v, QUANTILES[::2]).tolist() for name, v in means.items()},
    }


# What is shown.


def show(result: dict[str, Any]) -> str:
    """Tables of the two questions and of the scenario, in Markdown."""
    parts = []
    for question in dict.fromkeys(row["question"] for row in result["rows"]):
        rows = sorted((r for r in result["rows"] if r["question"] == question), key=lambda r: -r["test_nats"])
        body = []
        for r in rows:
            error = "" if r["test_nats_se"] is None else f" ± {r['test_nats_se']:.3f}"
            better = f"{r['better']:+.3f} ± {r['better_se']:.3f}" if "better" in r else ""
            body.append([r["model"], f"{r['test_nats']:.3f}{error}", better, f"{r['known_nats']:.3f}", r["note"]])
        head = [question, "nats a day, from 2015", "more than the best other", "to 2014", "chosen in the years to 2014"]
        parts.append(table(head, body))
    s = result["scenario"]
    if s["nats_near"]:
        happened = f"{len(s['days'])} such days, {sum(d['test'] for d in s['days'])} of them after 2014"
        head = [f"{s['one']} falls by {s['fall']:.0%}", "mean of the others: median", "5% to 95%"]
        head += [f"nats of the others on {happened}", "of their returns, within 5% to 95% of draws"]
        body = []
        for name in ("QuAR", "Gaussian"):
            low, median, high = s["mean_quantiles"][name]
            band = f"{low:.1f} to {high:.1f}%".replace("-0.0%", "0.0%")
            cells = [name, f"{median:.1f}%", band, f"{s['nats_near'][name]:.1f}"]
            within = [row[name][0] <= v <= row[name][-1] for row in s["shares"] for v in row["happened"]]
            body.append([*cells, f"{sum(within) / len(within):.0%}"])
        parts.append(table(head, body))
    return "\n\n".join(parts)


def picture(s: dict[str, Any], path: Path) -> None:
    """The scenario: each of the other shares on the left, their mean on the right."""
    from experiments.drawing import COLOURS, canvas, plain, save_png

    blue, orange = COLOURS[:2]
    shares = sorted(s["shares"], key=lambda row: row["QuAR"][2])
    figure = canvas(10, 0.27 * len(shares) + 1.6)
    left, right = figure.subplots(1, 2, width_ratios=[1.55, 1])
    for y, row in enumerate(reversed(shares)):
        low, first, median, third, high = row["QuAR"]
        left.plot([low, high], [y, y], color=blue, lw=7, alpha=0.25, solid_capstyle="round")
        left.plot([first, third], [y, y], color=blue, lw=7, alpha=0.6, solid_capstyle="butt")
        left.plot([median] * 2, [y - 0.28, y + 0.28], color="white", lw=2, zorder=3)
        low, _, median, _, high = row["Gaussian"]
        left.plot([low, high], [y - 0.4] * 2, color=orange, lw=1.3, solid_capstyle="round")
        left.plot([median], [y - 0.4], "o", color=orange, ms=2.8)
        for style, test in STYLES:
            x = [v for v, day in zip(row["happened"], s["days"], strict=True) if day["test"] == test]
            left.plot(x, [y] * len(x), **style | {"ms": 2.8}, zorder=4 + test)
    left.set_yticks(range(len(shares)), [row["share"] for row in reversed(shares)])
    left.tick_params(axis="y", length=0)
    left.set_ylim(-0.9, len(shares) - 0.3)
    left.set_xlim(-21, 11)
    left.axvline(0, color="#999999", lw=0.8, zorder=0)
    left.set_xlabel("log-return of the day, in percent")
    left.set_title(f"The others on a day on which {s['one']} falls by {s['fall']:.0%}", loc="left", fontsize=11)
    edges = np.array(s["mean"]["edges"])
    for name, colour in (("QuAR", blue), ("Gaussian", orange)):
        right.stairs(s["mean"][name], edges, color=colour, lw=1.6)
        right.stairs(s["mean"][name], edges, color=colour, alpha=0.15, fill=True)
    top = max(max(s["mean"][name]) for name in ("QuAR", "Gaussian"))
    happened = s["mean"]["happened"]
    for style, test in STYLES:
        x = [v for v, day in zip(happened, s["days"], strict=True) if day["test"] == test]
        right.plot(x, [-0.04 * top] * len(x), **style, zorder=4 + test)
    right.set(yticks=[], ylim=(-0.08 * top, 1.12 * top), xlim=(-14, 6))
    right.axvline(0, color="#999999", lw=0.8, zorder=0)
    right.set_xlabel("their mean, in percent")
    right.set_title("All of them together", loc="left", fontsize=11)
    for axes in (left, right):
        plain(axes)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", alpha=0.25, lw=0.5)
    handles = [
        left.plot([], [], color=blue, lw=7, alpha=0.45)[0],
        left.plot([], [], color=orange, lw=1.3, marker="o", ms=2.8)[0],
        *(left.plot([], [], **style)[0] for style, _ in STYLES),
    ]
    falls = "fell by {:.0%} to {:.0%}".format(*s["near"])
    labels = ["QuAR: 50% and 90%", "Gaussian: 90%", f"days to 2014 on which it {falls}", "such days since"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, path)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """The options that other benchmarks do not have."""
    folder = os.environ.get("QUARFLOW_TABLES", ".")
    parser.add_argument("--data", type=Path, default=Path(folder), help="folder of the prices (QUARFLOW_TABLES)")
    parser.add_argument("--seeds", type=int, default=3, help="how many")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, draws and prints."""
    options = start(__doc__, arguments, arguments_of)
    days, steps, draws = (Days.made(), 30, 500) if options.quick else (Days.read(options.data), STEPS, DRAWS)
    seeds = 2 if options.quick else options.seeds
    rows, setting = measure(days, steps, seeds)
    found = scenario(days, setting, steps, draws)
    settings = {"settings": SETTINGS, "steps": steps, "seeds": seeds}
    path = save(options, "shares", settings, rows, PACKAGES, scenario=found)
    picture(found, options.out / "shares.png")
    print(show(load(path)))


if __name__ == "__main__":
    main()
