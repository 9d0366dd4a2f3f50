"""Which settings of QuAR are best for which tables: what `quarflow.table_flow.defaults` rests on.

Every setting is trained as in `benchmarks.tabular`, for the same time on the same rows, and scored on held-out rows
that are *not* test rows of that benchmark: only its training and validation rows are looked at. They are split anew
for each seed, a tenth to stop early and a tenth to score on (in order of time for shares). zuko's flows take part with
three learning rates, so that they are not at a disadvantage. The score of a setting is the mean over tables of its
nats above those of the first setting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import load, save, start, table
from benchmarks.lanes import side_by_side
from benchmarks.tabular import PACKAGES, TABLES, Found, Split, lanes_of, limited, mixture, quar, zuko

SMALL = ("wine", "diabetes", "breast_cancer")  # the others have many rows
ORDERED = ("shares",)


def settings(model: dict[str, Any], **fit: Any) -> Callable[[Split, float, int], Found]:
    """QuAR with options of the model, and of the training."""
    return partial(quar, model_options=model, **fit)


# Each differs in one thing from the first.
_MANY: dict[str, Any] = {"block": "conditioned", "blocks": 4, "hidden": (16, 16), "conditioner": (64, 64)}
_MANY |= {"knots": 256, "base": "normal", "mixing": "reverse"}
_LONG: dict[str, Any] = {"patience": 20, "learning_rate": 5e-3, "batch_size": 512, "weight_decay": 0.0}
MANY: dict[str, Callable[[Split, float, int], Found]] = {
    "conditioned": settings(_MANY, **_LONG),
    "no knots": settings(_MANY | {"knots": 0}, **_LONG),
    "LU, rate 1e-2, decay 0.3": settings(
        _MANY | {"mixing": "lu"}, **_LONG | {"learning_rate": 1e-2, "weight_decay": 0.3}
    ),
    "64 knots": settings(_MANY | {"knots": 64}, **_LONG),
    "1024 knots": settings(_MANY | {"knots": 1024}, **_LONG),
    "8 blocks": settings(_MANY | {"blocks": 8}, **_LONG),
    "wide conditioner": settings(_MANY | {"conditioner": (128, 128)}, **_LONG),
    "plain, 8 x (16, 16)": settings(_MANY | {"block": "plain", "blocks": 8}, **_LONG),
    "decay 3": settings(_MANY, **_LONG | {"weight_decay": 3.0}),
    "decay 0.3": settings(_MANY, **_LONG | {"weight_decay": 0.3}),
    "rate 1e-2": settings(_MANY, **_LONG | {"learning_rate": 1e-2}),
    "zuko NSF, 3e-3": partial(zuko, "NSF", 3, learning_rate=3e-3),
    "zuko MAF, 3e-3": partial(zuko, "MAF", 5, learning_rate=3e-3),
    "Gaussian mixture": mixture,
    "rate 2e-3": settings(_MANY, **_LONG | {"learning_rate": 2e-3}),
    "no asinh": settings(_MANY, tails=False, **_LONG),
    "LU": settings(_MANY | {"mixing": "lu"}, **_LONG),
    "batch 256": settings(_MANY, **_LONG | {"batch_size": 256}),
    "zuko NSF, 1e-3": partial(zuko, "NSF", 3, learning_rate=1e-3),
    "zuko MAF, 1e-3": partial(zuko, "MAF", 5, learning_rate=1e-3),
    "zuko NSF, 1e-2": partial(zuko, "NSF", 3),
    "zuko MAF, 1e-2": partial(zuko, "MAF", 5),
    "start 0.01": settings(_MANY | {"start": 0.01}, **_LONG),
    "Student base": settings(_MANY | {"base": "student"}, **_LONG),
    "one hidden layer": settings(_MANY | {"hidden": (32,)}, **_LONG),
    "batch 1024": settings(_MANY, **_LONG | {"batch_size": 1024}),
    "sine": settings(_MANY | {"activation": "sine"}, **_LONG),
    "joint Student base": settings(_MANY | {"base": "joint-student"}, **_LONG),
    "plain, 8 x (32, 32)": settings(_MANY | {"block": "plain", "blocks": 8, "hidden": (32, 32)}, **_LONG),
    "default": quar,
}
_FEW: dict[str, Any] = {"block": "conditioned", "blocks": 2, "hidden": (8,), "conditioner": (32,), "start": 0.01}
_FEW |= {"knots": 8, "base": "normal", "mixing": "reverse"}
_SHORT: dict[str, Any] = {"max_steps": 600, "patience": 20, "evaluate_every": 10, "learning_rate": 5e-3}
_SHORT["weight_decay"] = 10.0
_SLOW = _SHORT | {"learning_rate": 2e-3, "weight_decay": 25.0, "max_steps": 1500}
FEW: dict[str, Callable[[Split, float, int], Found]] = {
    "decay 10": settings(_FEW, **_SHORT),
    "Gaussian mixture": mixture,
    "no knots": settings(_FEW | {"knots": 0}, **_SHORT),
    "16 knots": settings(_FEW | {"knots": 16}, **_SHORT),
    "32 knots": settings(_FEW | {"knots": 32}, **_SHORT),
    "4 knots": settings(_FEW | {"knots": 4}, **_SHORT),
    "decay 0": settings(_FEW, **_SHORT | {"weight_decay": 0.0}),
    "decay 3": settings(_FEW, **_SHORT | {"weight_decay": 3.0}),
    "decay 20": settings(_FEW, **_SHORT | {"weight_decay": 20.0}),
    "start 1": settings(_FEW | {"start": 1.0}, **_SHORT),
    "conditioner (128,)": settings(_FEW | {"conditioner": (128,)}, **_SHORT),
    "conditioner (64, 64)": settings(_FEW | {"conditioner": (64, 64)}, **_SHORT),
    "linear conditioner": settings(_FEW | {"conditioner": ()}, **_SHORT),
    "1 block": settings(_FEW | {"blocks": 1}, **_SHORT),
    "4 blocks": settings(_FEW | {"blocks": 4}, **_SHORT),
    "hidden (16, 16)": settings(_FEW | {"hidden": (16, 16)}, **_SHORT),
    "plain, 2 x (8, 8)": settings(_FEW | {"block": "plain", "hidden": (8, 8)}, **_SHORT),
    "plain, 4 x (16, 16)": settings(_FEW | {"block": "plain", "blocks": 4, "hidden": (16, 16)}, **_SHORT),
    "rate 2e-3, decay 25": settings(_FEW, **_SLOW),
    "rate 1e-2, decay 5": settings(_FEW, **_SHORT | {"learning_rate": 1e-2, "weight_decay": 5.0}),
    "LU, rate 1e-2, decay 5": settings(
        _FEW | {"mixing": "lu"}, **_SHORT | {"learning_rate": 1e-2, "weight_decay": 5.0}
    ),
    "LU, rate 1e-2, decay 5, 4 blocks, Student": settings(
        _FEW | {"mixing": "lu", "blocks": 4, "base": "student"},
        **_SHORT | {"learning_rate": 1e-2, "weight_decay": 5.0},
    ),
    "default": quar,
    "default, 4 blocks": settings({"blocks": 4}),
    "to the end": settings(_FEW, **_SHORT | {"patience": None}),
    "longer": settings(_FEW, **_SHORT | {"max_steps": 2000, "patience": 100}),
    "looks every 50": settings(_FEW, **_SHORT | {"evaluate_every": 50, "patience": 10}),
    "LU": settings(_FEW | {"mixing": "lu"}, **_SHORT),
    "Student base": settings(_FEW | {"base": "student"}, **_SHORT),
    "no asinh": settings(_FEW, tails=False, **_SHORT),
    "sine": settings(_FEW | {"activation": "sine"}, **_SHORT),
    "zuko NSF, 3e-3": partial(zuko, "NSF", 3, learning_rate=3e-3),
    "zuko MAF, 3e-3": partial(zuko, "MAF", 5, learning_rate=3e-3),
    "zuko NSF, 1e-3": partial(zuko, "NSF", 3, learning_rate=1e-3),
    "zuko MAF, 1e-3": partial(zuko, "MAF", 5, learning_rate=1e-3),
    "zuko NSF, 1e-2": partial(zuko, "NSF", 3),
    "zuko MAF, 1e-2": partial(zuko, "MAF", 5),
}
KINDS = {"many": MANY, "few": FEW}


def choosing(known: Split, seed: int, ordered: bool) -> Split:
    """The rows to train and validate on, split in three: the last tenth to score on, a tenth before it to stop.

    >>> rows = torch.arange(20.0)[:, None]
    >>> parts = choosing(Split(rows[:10], rows[10:], torch.empty(0, 1)), 0, ordered=True)
    >>> len(parts.train), parts.validation.flatten().tolist(), parts.test.flatten().tolist()
    (16, [16.0, 17.0], [18.0, 19.0])
    """
    rows = torch.cat([known.train, known.validation])
    if not ordered:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    held_out = min(len(rows) // 10, len(known.validation))
    return Split(*rows.split([len(rows) - 2 * held_out, held_out, held_out]))


@dataclass(frozen=True)
class Job:
    """One training with a setting on a table."""

    kind: str
    setting: str
    data: str
    seed: int
    folder: Path
    seconds: float


def train(job: Job) -> dict[str, Any]:
    """A job done."""
    data = choosing(limited(job.data, job.folder), job.seed, job.data in ORDERED)
    found = KINDS[job.kind][job.setting](data, job.seconds, job.seed)
    return {"kind": job.kind, "setting": job.setting, "data": job.data, "seed": job.seed, **asdict(found)}


def rows_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each setting: nats above the first setting's, in all and on each table; with the error over seeds."""
    nats = {(r["kind"], r["setting"], r["data"], r["seed"]): r["nats"] for r in runs}
    rows = []
    for kind, every in KINDS.items():
        first = next(iter(every))
        for setting in every:
            keys = [key for key in nats if key[:2] == (kind, setting) and (kind, first, *key[2:]) in nats]
            gains: dict[str, list[float]] = {}
            for key in keys:
                gains.setdefault(key[2], []).append(nats[key] - nats[kind, first, *key[2:]])
            if gains:
                each = {name: statistics.mean(gains[name]) for name in TABLES if name in gains}
                error = None  # of one split nothing is known
                if all(len(g) > 1 for g in gains.values()):
                    error = math.sqrt(sum(statistics.variance(g) / len(g) for g in gains.values())) / len(gains)
                row = {"kind": kind, "setting": setting, "gain": statistics.mean(each.values()), "gain_se": error}
                rows.append(row | {"gains": each, "seeds": {name: len(g) for name, g in gains.items()}})
    return rows


def show(result: dict[str, Any]) -> str:
    """A table for each kind, in Markdown: nats above the first setting's, on each table and in the mean."""
    parts = []
    for kind, every in KINDS.items():
        rows = [row for row in result["rows"] if row["kind"] == kind]
        names = [name for name in TABLES if any(name in row["gains"] for row in rows)]
        body = [
            [
                row["setting"],
                f"{row['gain']:+.3f}" + ("" if row["gain_se"] is None else f" ± {row['gain_se']:.3f}"),
                *(f"{row['gains'][name]:+.3f}" if name in row["gains"] else "" for name in names),
            ]
            for row in rows
        ]
        if rows:
            parts.append(table([f"{kind} rows: nats above {next(iter(every))!r}", "mean", *names], body))
    return "\n\n".join(parts)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """The options that other benchmarks do not have."""
    folder = os.environ.get("QUARFLOW_TABLES", ".")
    parser.add_argument("--data", type=Path, default=Path(folder), help="folder of the tables (QUARFLOW_TABLES)")
    parser.add_argument("--kind", choices=list(KINDS), default="many", help="of table: with many rows, or with few")
    parser.add_argument("--settings", nargs="+", help="by default all of the kind")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), help="by default all of the kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each job")
    parser.add_argument("--seeds", type=int, default=1, help="how many splits")
    lanes_of(parser)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures setting by setting, saves after each job, and prints."""
    options = start(__doc__, arguments, arguments_of)
    if options.quick:
        options.kind, options.tables, options.seconds, options.cores = "few", ["wine"], 0.2, 1
        options.settings = options.settings or ["decay 10", "Gaussian mixture", "zuko MAF, 1e-2"]
    large = [name for name in TABLES if name not in SMALL]
    tables = options.tables or (large if options.kind == "many" else list(SMALL))
    path = options.out / "defaults.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    same = {"seconds": options.seconds, "cores": options.cores}
    runs = before.get("runs", [])
    if runs and before["settings"] != same:
        raise SystemExit(f"{path} was measured with other settings, {before['settings']}: move it, or use --out.")
    there = {(run["kind"], run["setting"], run["data"], run["seed"]) for run in runs}
    jobs = [
        Job(options.kind, setting, name, seed, options.data, options.seconds)
        for seed, setting, name in product(range(options.seeds), options.settings or KINDS[options.kind], tables)
        if (options.kind, setting, name, seed) not in there
    ]
    for job, run in side_by_side(train, jobs, options.lanes, options.cores, options.seconds, options.minutes):
        runs.append(run)
        print(f"{job.data}, {job.setting}, {job.seed}: {run['nats']:.3f} nats, {run['note']}", flush=True)
        more = {"threads": options.cores, "lanes": options.lanes, "runs": runs}
        save(options, "defaults", same, rows_of(runs), PACKAGES, **more)
    print(show(load(path)))


if __name__ == "__main__":
    main()
