"""Held-out log-likelihood of ten tables: QuAR against zuko's MAF and NSF, Gaussian mixtures and kernel densities.

Every model gets the same rows and the same seconds on two cores of its own, and chooses on the same validation rows:
flows when to stop, mixtures the number of components, kernel densities their bandwidth. Test rows are looked at once,
in the end. QuAR is what a user of `FlowDensity` gets: `quarflow.table_flow.fit_table` with its defaults.
Columns with repeated values get uniform noise of the size of their steps, once, before the rows are split; columns are
standardised by the training rows, and log-likelihoods are those of the standardised columns.

A job is one training of a model on a table; ``--lanes`` of them run side by side. Each result is written at once, and a
run that was cut, or that ends after ``--minutes``, goes on where it was.

``--power`` trains variants of QuAR on all of POWER, by the published protocol, side by side on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import quarflow as qf
from benchmarks.harness import load, save, start, table
from benchmarks.lanes import side_by_side
from quarflow.data.tabular import load_table, split
from quarflow.table_flow import fit_table
from quarflow.tables import Column, Schema, as_table
from quarflow.training import History, TrainingDiverged

if TYPE_CHECKING:
    from quarflow.graph_training import GraphTrainer

PACKAGES = ("zuko", "scikit-learn")
LIMITS = {"train": 200_000, "validation": 10_000, "test": 20_000}  # rows, the first of each part
SMALL = 1000  # training rows below which every model is a small one
KERNELS = 20_000  # rows that a kernel density keeps


@dataclass(frozen=True)
class Split:
    """Rows of a table, standardised by those to train on."""

    train: Tensor
    validation: Tensor
    test: Tensor

    @classmethod
    def of(cls, train: Tensor, validation: Tensor, test: Tensor, moments: Tensor | None = None) -> Split:
        """Of rows in their own units, with the ``moments`` of some of them: by default the training rows."""
        rows = train if moments is None else moments
        mean, deviation = rows.mean(0), rows.std(0, correction=0)
        return cls(*(((part - mean) / deviation).float() for part in (train, validation, test)))

    def limited(self) -> Split:
        """The first rows of each part, as many as `LIMITS` says."""
        return Split(*(getattr(self, name)[:limit] for name, limit in LIMITS.items()))


def continuous(x: np.ndarray, seed: int = 0) -> Tensor:
    """Rows whose columns have no repeated values: uniform noise of the size of the steps between them.

    A step is the lower decile of the gaps between a column's distinct values: 1 for whole numbers.

    >>> x = continuous(np.array([[1.0, 0.1], [2.0, 0.2], [2.0, 0.3]]))
    >>> bool((x[:, 0].floor() == torch.tensor([1, 2, 2])).all()), x[:, 1].tolist()
    (True, [0.1, 0.2, 0.3])
    """
    x, noise = np.array(x, dtype=np.float64), np.random.default_rng(seed).random(x.shape)
    for column, u in zip(x.T, noise.T, strict=True):
        distinct = np.unique(column)
        if 1 < len(distinct) < len(column):
            column += np.quantile(np.diff(distinct), 0.1) * u
    return torch.from_numpy(x)


def shuffled(x: np.ndarray) -> Split:
    """Rows at random: a tenth for validation, a tenth for the test."""
    return Split.of(*split(continuous(x)))


def file(folder: Path, name: str) -> Path:
    """A file of the folder of tables; an error that says how to name the folder if it is not there."""
    if (path := folder / name).exists():
        return path
    raise FileNotFoundError(f"{path}: expected a table; give its folder with --data or the variable QUARFLOW_TABLES.")


def inliers(name: str, folder: Path) -> Split:
    """The inliers of an outlier set."""
    found = np.load(file(folder, name))
    return shuffled(found["X"][found["y"] == 0])


def protein(folder: Path) -> Split:
    """Physicochemical properties of protein structures (UCI), ten columns."""
    return shuffled(np.loadtxt(file(folder, "protein.csv.gz"), delimiter=","))


def returns(folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Daily log-returns of 20 shares: the days, the returns, the shares."""
    path = file(folder, "sp500_daily_prices.csv.gz")
    cells = np.loadtxt(path, delimiter=",", dtype=str)
    # Prices are rounded to a thousandth; without noise many returns would be zero.
    prices = cells[1:, 1:].astype(float)
    prices += 0.001 * np.random.default_rng(0).random(prices.shape)
    return cells[2:, 0], np.diff(np.log(prices), axis=0), tuple(cells[0, 1:].tolist())


def shares(folder: Path) -> Split:
    """Daily log-returns of 20 shares: the years to 2014, the last tenth of them for validation; the test is later."""
    dates, found, _ = returns(folder)
    before = int((dates < "2015").sum())
    known, later = torch.from_numpy(found).split([before, len(found) - before])
    return Split.of(*known.split([before - before // 10, before // 10]), later)


def power(folder: Path) -> Split:
    """POWER by the published protocol (Papamakarios et al. 2017), all of its rows; nats are comparable with papers."""
    found, generator = np.load(file(folder, "power.npz")), np.random.RandomState(42)
    x = found["q"] / found["scale"]
    generator.shuffle(x)
    x = np.delete(np.delete(x, 3, axis=1), 1, axis=1)  # active power, voltage, three sub-meterings, minute of the day
    n = len(x)
    voltage, active, meters = 0.01 * generator.rand(n, 1), 0.001 * generator.rand(n, 1), generator.rand(n, 3)
    x += np.hstack([active, voltage, meters, np.zeros((n, 1))])
    rows, test = torch.from_numpy(x).split([n - n // 10, n // 10])
    train, validation = rows.split([len(rows) - len(rows) // 10, len(rows) // 10])
    return Split.of(train, validation, test, moments=rows)


TABLES: dict[str, Callable[[Path], Split]] = {
    "power": power,
    "protein": protein,
    "shares": shares,
    **{name.split("_")[1]: partial(inliers, f"{name}.npz") for name in ("32_shuttle", "30_satellite", "38_thyroid")},
    "mammography": partial(inliers, "23_mammography.npz"),
    **{
        name: lambda folder, n=name: shuffled(load_table(n, torch.float64).x.numpy())
        for name in ("breast_cancer", "wine", "diabetes")
    },
}


@dataclass(frozen=True)
class Found:
    """What one training of a model gave: test nats, their standard error over rows, and what it took."""

    nats: float
    row_error: float
    parameters: int
    seconds: float
    note: str = ""

    @classmethod
    def of(cls, log_prob: Tensor, parameters: int, seconds: float, note: str = "") -> Found:
        """From the log-density of each test row."""
        error = log_prob.std().item() / math.sqrt(len(log_prob))
        return cls(log_prob.mean().item(), error, parameters, seconds, note)


def quar(data: Split, seconds: float, seed: int, **options: Any) -> Found:
    """QuAR as a user gets it, from `fit_table` with its defaults, or with some of its ``options`` changed."""
    train, validation, test = (as_table(part.double().numpy()) for part in (data.train, data.validation, data.test))
    settings: dict[str, Any] = {"columns": dict.fromkeys(train, "number"), "validation": validation, "progress": False}
    began = time.monotonic()
    flow, history = fit_table(train, max_seconds=seconds, seed=seed, **settings | options)
    spent = time.monotonic() - began
    log_prob, size = torch.from_numpy(flow.score(test)), sum(p.numel() for p in flow.parameters())
    return Found.of(log_prob, size, spent, f"best at step {history.best_step} of {history.validation_steps[-1]}")


def zuko(kind: str, transforms: int, data: Split, seconds: float, seed: int, **options: Any) -> Found:
    """zuko's MAF or NSF, standardised as our flows are, trained by `quarflow.fit` with its defaults or ``options``."""
    import zuko

    rows, features = data.train.shape
    hidden = (32, 32) if rows < SMALL else (128, 128) if kind == "MAF" else (64, 64)
    torch.manual_seed(seed)
    flow = getattr(zuko.flows, kind)(features, transforms=transforms, hidden_features=hidden)
    flow = qf.interop.from_zuko(flow, features, standardise=True)
    settings: dict[str, Any] = {"max_seconds": seconds, "seed": seed, "progress": False}
    began = time.monotonic()
    try:
        history = qf.fit(flow, data.train, validation=data.validation, **settings | options)
        note = f"best at step {history.best_step} of {history.validation_steps[-1]}"
    except TrainingDiverged:
        note = "diverged; the best weights before"
    spent = time.monotonic() - began
    found = qf.evaluate(flow, data.test)
    return Found(found.nats, found.standard_error, sum(p.numel() for p in flow.parameters()), spent, note)


def mixture(data: Split, seconds: float, seed: int) -> Found:
    """A Gaussian mixture with full covariances; 1, 2, 4 .. components while that helps and the time allows."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    train, validation, test = (part.double().numpy() for part in (data.train, data.validation, data.test))
    began, best, best_nats, components = time.monotonic(), None, -math.inf, 1
    while components < len(train) // 2 and time.monotonic() - began < seconds:
        # In parts, so that the time is kept.
        candidate = GaussianMixture(components, reg_covar=1e-5, max_iter=10, warm_start=True, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for _ in range(20):
                candidate.fit(train)
                if candidate.converged_ or time.monotonic() - began > seconds:
                    break
        if (nats := candidate.score(validation)) <= best_nats:
            break
        best, best_nats, components = candidate, nats, 2 * components
    if best is None:
        raise ValueError(f"train: expected 4 rows or more for a mixture; got {len(train)}.")
    spent, (k, d) = time.monotonic() - began, best.means_.shape
    parameters = k - 1 + k * d + k * d * (d + 1) // 2
    return Found.of(torch.from_numpy(best.score_samples(test)), parameters, spent, f"{k} components")


def kernel_log_prob(centres: Tensor, x: Tensor, widths: Sequence[float]) -> Tensor:
    """Log-density of ``x`` under normal kernels of each of the ``widths`` at the ``centres``: (widths, rows).

    >>> kernel_log_prob(torch.zeros(1, 1), torch.zeros(1, 1), [1.0])
    tensor([[-0.9189]])
    """
    parts = []
    for rows in x.split(500):
        squares = torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist").square_()
        parts.append(torch.stack([torch.logsumexp(squares / (-2 * w * w), 1) for w in widths]))
    constants = [x.shape[1] * math.log(w * math.sqrt(2 * math.pi)) + math.log(len(centres)) for w in widths]
    return torch.cat(parts, 1) - torch.tensor(constants)[:, None]


def kernel_density(data: Split, seconds: float, seed: int) -> Found:
    """A kernel density, one bandwidth for all standardised columns; of too many rows some are kept, by seed."""
    began = time.monotonic()
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    centres = data.train[order[:KERNELS]]
    widths = np.geomspace(0.02, 2, 25).tolist()
    nats = kernel_log_prob(centres, data.validation[:2000], widths).mean(1)
    width = widths[int(nats.argmax())]
    spent = time.monotonic() - began
    return Found.of(kernel_log_prob(centres, data.test, [width])[0], centres.numel(), spent, f"bandwidth {width:.3f}")


MODELS: dict[str, Callable[[Split, float, int], Found]] = {
    "QuAR": quar,
    # The learning rate is the best of three on rows held out for it: `benchmarks.defaults`.
    "zuko MAF": partial(zuko, "MAF", 5, learning_rate=3e-3),
    "zuko NSF": partial(zuko, "NSF", 3, learning_rate=3e-3),
    "Gaussian mixture": mixture,
    "kernel density": kernel_density,
}


@dataclass(frozen=True)
class Job:
    """One training of a model on a table."""

    data: str
    model: str
    seed: int
    folder: Path
    seconds: float


@lru_cache(maxsize=1)
def limited(name: str, folder: Path) -> Split:
    """A table; a lane keeps the last one."""
    return TABLES[name](folder).limited()


def train(job: Job) -> dict[str, Any]:
    """A job done: what `rows_of` reads."""
    data = limited(job.data, job.folder)
    found = asdict(MODELS[job.model](data, job.seconds, job.seed))
    size = {"rows": len(data.train), "features": data.train.shape[1]}
    return {"data": job.data, "model": job.model, "seed": job.seed, **size, **found}


def rows_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of results for each table and model, in the order of `TABLES` and `MODELS`: mean and error over seeds."""
    rows = []
    for name, model in product(TABLES, MODELS):
        found = sorted((r for r in runs if (r["data"], r["model"]) == (name, model)), key=lambda r: int(r["seed"]))
        if not found:
            continue
        nats = [run["nats"] for run in found]
        error = statistics.stdev(nats) / math.sqrt(len(nats)) if len(nats) > 1 else None
        row = {key: found[0][key] for key in ("data", "model", "rows", "features")}
        row |= {"test_nats": statistics.mean(nats), "test_nats_se": error, "seeds": len(nats)}
        row |= {"row_error": statistics.mean(run["row_error"] for run in found), "parameters": found[0]["parameters"]}
        rows.append(row | {"seconds": statistics.mean(run["seconds"] for run in found)})
    return rows


# POWER on a GPU: the first is the reference, each other changes something.
_BASE: dict[str, Any] = {"block": "conditioned", "blocks": 10, "hidden": (16, 16), "conditioner": (256, 256)}
_BASE["knots"] = 1024
_PLAIN: dict[str, Any] = {"blocks": 10, "hidden": (64, 64), "knots": 1024}
POWER: dict[str, dict[str, Any]] = {
    "conditioned": _BASE,
    "conditioned, LU": _BASE | {"mixing": "lu"},
    "conditioned, no knots": _BASE | {"knots": 0},
    "conditioned, 16 blocks": _BASE | {"blocks": 16},
    "conditioned, LU, 16 blocks": _BASE | {"mixing": "lu", "blocks": 16},
    "conditioned, wider": _BASE | {"conditioner": (512, 512), "hidden": (32, 32)},
    "conditioned, narrower": _BASE | {"conditioner": (128, 128)},
    "conditioned, one hidden layer": _BASE | {"hidden": (32,)},
    "conditioned, sine": _BASE | {"activation": "sine"},
    "plain": _PLAIN,
    "plain, no knots": _PLAIN | {"knots": 0},
    "plain, sine": _PLAIN | {"activation": "sine"},
    "plain, ELU": _PLAIN | {"activation": "elu"},
    "plain, network bound": _PLAIN | {"lipschitz": "network"},
    "plain, LU": _PLAIN | {"mixing": "lu"},
}


class OutOfTime(Exception):
    """The minutes are over; the states of the runs are in their files."""


def train_power(data: Split, options: argparse.Namespace, state: Path) -> dict[GraphTrainer, str]:
    """All variants side by side, to the end of their steps or minutes, from where the files in ``state`` left them."""
    from quarflow.graph_training import GraphTrainer, run_together
    from quarflow.training import Options, Rows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, validation = Rows(data.train.to(device)), Rows(data.validation.to(device))
    # As the flow of a table that is standardised already: quantiles, the Gaussian, and the blocks.
    schema = Schema(tuple(Column(f"x{i}", "number") for i in range(data.train.shape[1])))
    seconds = None if options.steps else 60 * options.minutes
    how: dict[str, Any] = {"learning_rate": options.rate, "ema": 0.9995, "precision": options.precision}
    settings = Options(options.steps, seconds, batch_size=options.batch, **how)
    trainers: dict[GraphTrainer, str] = {}
    for name in options.variants:
        torch.manual_seed(0)
        flow = qf.models.table(schema, **POWER[name]).to(device)
        flow.initialise(train.x[: 2**20])
        trainers[GraphTrainer(flow.train(), train, validation, settings)] = name
    for trainer, name in trainers.items():
        trainer.started = time.monotonic()
        if (path := state / f"{name}.training").exists():
            trainer.read(path)
    began = time.monotonic()
    looks = {trainer: int(options.looks * trainer.progress()) for trainer in trainers}

    def watch() -> None:
        over = options.steps is not None and time.monotonic() - began > 60 * options.minutes
        for trainer, name in trainers.items():
            look = int(options.looks * trainer.progress())
            if trainer.history.stopped is None and (over or look > looks[trainer]):
                looks[trainer] = look
                with trainer.queued():
                    if not over:
                        trainer.evaluate()
                        print(f"{name}: {trainer.history}", flush=True)
                    trainer.write(state / f"{name}.training")
        if over:
            raise OutOfTime

    for trainer, error in run_together(list(trainers), watch).items():
        print(f"{trainers[trainer]}: {error}")
    return trainers


def power_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant: the weights that were best on the validation rows, scored once on all test rows."""
    state = options.out / "power"
    state.mkdir(parents=True, exist_ok=True)
    data = power(options.data)
    rows = []
    for trainer, name in train_power(data, options, state).items():
        history: History = trainer.history
        found = qf.evaluate(trainer.flow, data.test)
        label = f"{name}, rate {trainer.options.learning_rate:g}"
        row = {"model": label, "options": POWER[name], "test_nats": found.nats, "test_nats_se": found.standard_error}
        row |= {"validation_nats": history.best_validation, "steps": trainer.step, "batch": trainer.batch_size}
        row |= {"rate": trainer.options.learning_rate, "seconds": history.seconds}
        row |= {"parameters": sum(p.numel() for p in trainer.parameters), "beside": len(options.variants) - 1}
        rows.append(row | {"stopped": history.stopped})
        print(f"{name}: {found}", flush=True)
    return rows


def show(result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown: nats of each table and model with the error over seeds; then POWER."""
    rows = {(row["data"], row["model"]): row for row in result["rows"]}
    names, models = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))

    def cell(name: str, model: str) -> str:
        row = rows.get((name, model))
        if row is None:
            return ""
        error = "" if row["test_nats_se"] is None else f" ± {row['test_nats_se']:.3f}"
        nats = f"{row['test_nats']:.3f}{error}"
        top = max(rows[key]["test_nats"] for key in rows if key[0] == name)
        return f"**{nats}**" if row["test_nats"] == top else nats

    sizes = {name: next(row for key, row in rows.items() if key[0] == name) for name in names}
    body = [[n, f"{sizes[n]['rows']} x {sizes[n]['features']}", *(cell(n, m) for m in models)] for n in names]
    parts = [table(["table", "training rows", *models], body)] if rows else []
    if result.get("power_gpu"):
        head = ["POWER, all rows", "test nats", "validation", "parameters", "steps", "seconds", "runs beside it"]
        variants = sorted(result["power_gpu"], key=lambda r: -r["test_nats"])
        body = [
            [
                r["model"],
                f"{r['test_nats']:.3f} ± {r['test_nats_se']:.3f}",
                "" if r["validation_nats"] is None else f"{r['validation_nats']:.3f}",
                r["parameters"],
                r["steps"],
                f"{r['seconds']:.0f}",
                r["beside"],
            ]
            for r in variants
        ]
        parts.append(table(head, body))
    return "\n\n".join(parts)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """The options that other benchmarks do not have."""
    folder = os.environ.get("QUARFLOW_TABLES", ".")
    parser.add_argument("--data", type=Path, default=Path(folder), help="folder of the tables (QUARFLOW_TABLES)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each model and seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    lanes_of(parser)
    parser.add_argument("--power", action="store_true", help="variants of QuAR on all of POWER, on a GPU")
    parser.add_argument("--variants", nargs="+", choices=list(POWER), default=list(POWER))
    parser.add_argument("--steps", type=int, help="of --power; without them it takes --minutes, decay of rate and all")
    parser.add_argument("--batch", type=int, default=4096, help="rows of a step of --power")
    parser.add_argument("--looks", type=int, default=20, help="at the validation rows, in a run of --power")
    parser.add_argument("--precision", choices=("full", "tf32"), default="tf32", help="of products in --power")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of --power")


def lanes_of(parser: argparse.ArgumentParser) -> None:
    """The options of jobs side by side, of this benchmark and of `benchmarks.defaults`."""
    parser.add_argument("--lanes", type=int, default=1, help="jobs side by side")
    parser.add_argument("--cores", type=int, default=2, help="of each lane, which no other has, and as many threads")
    parser.add_argument("--minutes", type=float, default=math.inf, help="by when to end; the same command goes on")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves after each job, and prints."""
    options = start(__doc__, arguments, arguments_of)
    if options.quick:
        options.tables, options.seconds, options.seeds, options.cores = ["wine"], 0.2, 2, 1
    path = options.out / "tabular.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    settings = {"seconds": options.seconds, "cores": options.cores, "limits": LIMITS}
    runs, known = before.get("runs", []), {"power_gpu": before.get("power_gpu", [])}
    if runs and before["settings"] != settings:
        raise SystemExit(f"{path} was measured with other settings, {before['settings']}: move it, or use --out.")

    def keep() -> None:
        result = {"threads": options.cores, "lanes": options.lanes, **known, "runs": runs}
        save(options, "tabular", settings, rows_of(runs), PACKAGES, **result)

    if options.power:
        if options.steps is None and options.minutes == math.inf:
            raise SystemExit("--power: expected --steps, --minutes, or both.")
        try:
            again = [f"{name}, rate {options.rate:g}" for name in options.variants]
            others = [row for row in known["power_gpu"] if row["model"] not in again]
            known["power_gpu"] = others + power_rows(options)
        except OutOfTime:
            raise SystemExit(f"Out of time. The same command goes on from {options.out / 'power'}.") from None
        keep()
    else:
        there = {(run["data"], run["model"], run["seed"]) for run in runs}
        every = product(options.tables, range(options.seeds), options.models)
        jobs = [
            Job(name, model, seed, options.data, options.seconds)
            for name, seed, model in every
            if (name, model, seed) not in there
        ]
        place = options.lanes, options.cores, options.seconds, options.minutes
        for job, run in side_by_side(train, jobs, *place):
            runs.append(run)
            said = f"{job.data}, {job.model}, seed {job.seed}: {run['nats']:.3f} nats"
            print(f"{said}, {run['seconds']:.0f} s, {run['note']}", flush=True)
            keep()
    print(show(load(path)))


if __name__ == "__main__":
    main()
