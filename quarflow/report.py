"""What a model of a table is worth, on the rows of a file: numbers for `quarflow.report_page`, which writes the page.

Rows that the model learnt from flatter it. So the model's file says what its rows can be recognised by, and the figures
are of others: where the file is the table of the fit, of the rows held out then.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quarflow.checkpoint import write_file
from quarflow.checks import check_count
from quarflow.peers import LEAST, peers
from quarflow.report_page import page
from quarflow.table_files import draw, to_table
from quarflow.table_flow import TableFlow, fitted_rows, known_part
from quarflow.tables import ATOM, Column, Rows, Table
from quarflow.training import History

ROWS = 5000  # of each kind, for figures and pictures
RECOGNISED = 10**7  # rows of a fit that are looked for in a file
PAIRED = 100  # columns whose pairs are looked at
SHOWN = {"pairs": 6, "rows": 10}  # on the page
DEPENDENT = 0.01  # nats of mutual information from which on a pair is worth a picture
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of the regions whose coverage is told


@dataclass
class Look:
    """What there is to see of a column or a pair: rows of the file beside draws of the model."""

    name: str
    rows: np.ndarray
    draws: np.ndarray
    distance: float  # of a column: Kolmogorov-Smirnov, or total variation of categories
    noise: float = 0.0  # a distance that chance alone would give one time in a thousand, or less often


@dataclass
class Surprise:
    """A row of low density, and the columns that make it so: name, value, nats."""

    number: int
    nats: float
    columns: list[tuple[str, Any, float]]
    values: dict[str, Any]


@dataclass
class Report:
    """All that the page says; arrays are for pictures, and not in `summary`."""

    model: str
    data: str
    flow: TableFlow
    history: History | None
    rows_in_file: int
    rows: int  # of the file that are looked at
    kind: str = "new"  # of the rows judged: "new", "held out", "learnt", "mixed" or "unknown"
    said: list[str] = field(default_factory=list)  # of what is held out, and what is not
    fit_rows: tuple[int, int] | None = None  # learnt from, held out
    warnings: list[str] = field(default_factory=list)
    judged: int = 0
    impossible: int = 0
    nats: float | None = None
    standard_error: float | None = None
    label_nats: float | None = None  # the part of the categories
    training_nats: float | None = None
    training_error: float | None = None
    compared: int = 0
    peers: list[dict[str, Any]] = field(default_factory=list)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))  # of the rows judged
    draw_scores: np.ndarray = field(default_factory=lambda: np.empty(0))
    latents: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # of the rows judged, that are possible
    # The least probability of a region that holds each row judged: a central one of the latents, and a densest one.
    central: np.ndarray = field(default_factory=lambda: np.empty(0))
    densest: np.ndarray = field(default_factory=lambda: np.empty(0))
    columns: list[Look] = field(default_factory=list)
    pairs: list[tuple[Column, Column, float, float]] = field(default_factory=list)  # dependence of rows, of draws
    paired: int = 0  # columns among which pairs were looked for
    table: Table = field(default_factory=dict)
    draws: Table = field(default_factory=dict)
    by_order: bool = False
    surprises: list[Surprise] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Numbers and text, for JSON, which has no infinity: null stands for it."""
        names = ["model", "data", "rows_in_file", "rows", "kind", "judged", "impossible", "nats", "standard_error"]
        names += ["training_nats", "training_error", "compared", "peers", "coverage", "warnings"]
        found = {name: getattr(self, name) for name in names}
        found["columns"] = {look.name: round(look.distance, 6) for look in self.columns}
        found["pairs"] = [{"columns": [a.name, b.name], "rows": x, "draws": y} for a, b, x, y in self.pairs]
        finite = {nats: nats if math.isfinite(nats) else None for s in self.surprises for *_, nats in s.columns}
        found["surprising"] = [
            {
                "row": s.number,
                "nats": s.nats if math.isfinite(s.nats) else None,
                "columns": [[name, value, finite[nats]] for name, value, nats in s.columns],
            }
            for s in self.surprises
        ]
        return found


def write(
    flow: TableFlow,
    data: str,
    out: str | os.PathLike[str],
    *,
    model: str = "the model",
    train: str | None = None,
    rows: int = ROWS,
    seed: int = 0,
    show: Callable[[float], None] = lambda done: None,
) -> dict[str, Any]:
    """The page about a model and a file of a table, all or nothing; gives its numbers, for JSON.

    Args:
        flow: from a model's file.
        data: the file; ``-`` is standard input.
        out: the page, HTML.
        model: its name on the page.
        train: a file of rows for the peers to learn from, if ``data`` is another table than that of the fit.
        rows: at most so many of each kind, held out and learnt from, drawn at random.
        seed: of the draws.
        show: is told the part that is done.
    """
    if not Path(out).absolute().parent.is_dir():
        raise FileNotFoundError(f"out: the folder {Path(out).absolute().parent} does not exist. Create it first.")
    check_count("rows", rows, least=2)
    flow = copy.deepcopy(flow).cpu().eval()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as raised, torch.no_grad():
        warnings.simplefilter("always")
        torch.manual_seed(seed)  # of estimates, where the density is one
        found = look(flow, data, model, train, rows, seed, show)
    # DATA and what the others learn from may say the same.
    found.warnings[:0] = dict.fromkeys(str(w.message) for w in raised if issubclass(w.category, UserWarning))
    write_file(Path(os.path.realpath(out)), page(found).encode())
    return {**found.summary(), "report": str(out)}


def look(
    flow: TableFlow,
    data: str,
    model: str,
    train: str | None,
    most: int,
    seed: int,
    show: Callable[[float], None],
) -> Report:
    """The report of a model and a file."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    history, fitted, fit_seed = _notes(flow)
    # Rows of the fit, in a file that has more than it took, are those of the same draw.
    drawn = draw(data, most + fitted, fit_seed, lambda done: show(0.2 * done))
    table = to_table(drawn.rows, flow.schema)
    rows = flow.schema.encode(table, 1, flow.gaps)
    whole = ~np.isnan(rows.x).any(1)
    first = np.sort(np.argsort(drawn.keys, kind="stable")[:fitted])
    places = fitted_rows(flow, _at(rows, first)) if fitted else None

    found = Report(model, data, flow, history, drawn.total, 0)
    learn = None
    if places is None:
        judged = _some(np.flatnonzero(whole), most, rng)
        kept = judged
    else:
        learnt, held_out = (_some(first[part][whole[first[part]]], most, rng) for part in places)
        unseen = _some(np.setdiff1d(np.flatnonzero(whole), first), most, rng)
        judged = unseen if len(unseen) else held_out if len(held_out) else learnt
        found.fit_rows = len(places[0]), len(places[1])
        found.kind = "new" if len(unseen) else "held out" if len(held_out) else "learnt"
        kept = np.union1d(judged, learnt)
        if train is not None:
            raise ValueError(f"train: {data} is the table of the fit, so it is known what was learnt. Leave train out.")
        learn = _possible(_at(rows, learnt))
    if train is not None:
        other = draw(train, most, seed)
        learn = flow.schema.encode(to_table(other.rows, flow.schema), 1, flow.gaps)
        learn = _possible(_at(learn, np.flatnonzero(~np.isnan(learn.x).any(1))))
    if not len(judged):
        raise ValueError(f"data: expected rows without missing values; got none in {data}.")
    held = _at(rows, judged)
    found.rows = len(kept)
    if not whole.all():
        lacking = _n(int((~whole).sum()), "row")
        found.said.append(f"Figures are of rows without missing values; {lacking} with some were left out.")
    _say(found, flow, rows, held, train, learn)

    # How likely rows are.
    table = {name: values[kept] for name, values in table.items()}
    rows, numbers = _at(rows, kept), drawn.numbers[kept]
    scores = _scores(flow, rows)
    show(0.3)
    found.judged, found.scores = len(judged), scores[np.searchsorted(kept, judged)]
    finite = found.scores[np.isfinite(found.scores)]
    found.impossible = len(judged) - len(finite)
    found.nats, found.standard_error = _mean(finite)
    if flow.schema.labels and found.nats is not None:
        found.label_nats = float(_labels(flow, _possible(held)).mean())
    if learn is not None and found.kind != "learnt" and len(learn.x):
        found.training_nats, found.training_error = _mean(_scores(flow, learn))
    show(0.35)
    _compare(found, flow, learn, held, rng)
    show(0.7)

    # Draws, with the context of rows.
    count = max(2000, min(ROWS, len(kept)))
    given = rng.choice(len(kept), count)
    context = None if rows.context is None else torch.as_tensor(rows.context[given]).to(flow.base.anchor)
    x = flow.sample(count, context, generator).double().numpy()
    found.draw_scores = flow.score_rows(x, None if rows.context is None else rows.context[given])
    found.table = table
    found.draws = flow.schema.decode(x, {c.name: table[c.name][given] for c in flow.schema.given})
    show(0.85)
    _calibrate(found, flow, held, rng, generator)
    modelled = [c for c in flow.schema.columns if c in flow.schema.numbers or c in flow.schema.labels]
    found.columns = [_marginal(c, table[c.name], found.draws[c.name]) for c in modelled]
    _pair(found, modelled)
    found.by_order = flow.in_one_order
    found.surprises = _surprises(flow, table, rows, scores, numbers)
    _warn(found, flow)
    show(1.0)
    return found


def _notes(flow: TableFlow) -> tuple[History | None, int, int]:
    """The history of the fit, its rows and its seed, from the notes in the model's file."""
    notes = flow.notes
    if not notes:
        return None, 0, 0
    try:
        history = History(**notes["history"])
        numbers = [*history.steps, *history.loss, *history.validation_steps, *history.validation, history.seconds]
        numbers += [history.best_step or 0, history.best_validation or 0]
        sketch = np.array(notes["sketch"], dtype=np.uint64)
        if (
            np.array(numbers, dtype=float).ndim == sketch.ndim == 1
            and len(history.steps) == len(history.loss)
            and len(history.validation_steps) == len(history.validation)
            and isinstance(history.stopped, str | None)
            and isinstance(notes["held_out"], float | int)
            and 0 <= notes["held_out"] < 1
            and all(isinstance(notes[key], int) and notes[key] >= 0 for key in ("rows", "seed"))
        ):
            return history, notes["rows"] if notes["rows"] <= RECOGNISED else 0, notes["seed"]
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise ValueError("model: its notes of the training are damaged. Use another copy of the file, or fit again.")


def _at(rows: Rows, places: np.ndarray) -> Rows:
    return Rows(rows.x[places], None if rows.context is None else rows.context[places], rows.possible[places])


def _possible(rows: Rows) -> Rows:
    return _at(rows, np.flatnonzero(rows.possible))


def _some(places: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most so many of them, in order."""
    return np.sort(places if len(places) <= most else rng.choice(places, most, replace=False))


def _tensors(flow: TableFlow, rows: Rows) -> tuple[Tensor, Tensor | None]:
    x, context = (None if part is None else torch.as_tensor(part).to(flow.base.anchor) for part in rows[:2])
    return x, context  # type: ignore[return-value]


def _scores(flow: TableFlow, rows: Rows) -> np.ndarray:
    nats = flow.score_rows(rows.x, rows.context)
    nats[~rows.possible] = -math.inf
    return nats


def _labels(flow: TableFlow, rows: Rows) -> np.ndarray:
    """``log P`` of the categories of rows."""
    x, context = _tensors(flow, rows)
    known = x.new_zeros(len(x), 0) if context is None else context
    return flow.labels(x[:, len(flow.schema.numbers) :].long(), known).double().numpy()


def _mean(values: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and standard error; None where there are too few values."""
    if len(values) == 0:
        return None, None
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def _say(found: Report, flow: TableFlow, rows: Rows, held: Rows, train: str | None, learn: Rows | None) -> None:
    """In words, what is held out, and what is not."""
    if found.fit_rows:
        learnt, held_out = found.fit_rows
        said = {
            "held out": f"This file is the table of the fit. Of its rows, {held_out:,} were held out then: the model "
            "did not learn from them, but training kept the weights under which they were likeliest, which flatters it "
            "a little. Likelihood and calibration are of these rows. For a judgement that nothing has touched, give a "
            "file of new rows.",
            "new": f"The model was fitted to {_n(learnt + held_out, 'row')} drawn at random from this file. Likelihood "
            "and calibration are of rows of it that were not among them.",
            "learnt": f"This file is the table of the fit, and none of its {_n(learnt, 'row')} were held out. "
            "Likelihood and calibration are of rows that the model learnt from, which flatters it.",
        }
        found.said.append(said[found.kind])
        if learn is not None and found.kind != "learnt":
            those = "the" if len(learn.x) == learnt else f"{len(learn.x):,} of the {learnt:,}"
            found.said.append(f"The other densities learnt from {those} rows that the model learnt from.")
        if found.kind == "learnt":
            found.warnings.append("Nothing was held out: every figure is of rows that the model learnt from.")
        return
    if not flow.notes:
        found.kind = "unknown"
        found.said.append(
            "The model's file does not say which rows it learnt from. Figures are right if none of these rows were "
            "among them, and flatter the model otherwise."
        )
        found.warnings.append("It is not known whether the model has learnt from rows of this file.")
    else:
        part = known_part(flow, rows)
        if not any(c.step == 0 for c in flow.schema.numbers):
            found.said.append(
                "This file is not the table of the fit, and its rows count as held out. Whether some of them were in "
                "that table cannot be told: no column is continuous."
            )
        elif part < 0.01:
            found.said.append(
                "This file is not the table of the fit, and its rows count as held out. Those that could be checked "
                "were not in that table."
            )
        else:
            found.kind = "mixed"
            text = f"About {part:.0%} of the rows of this file were in the table of the fit as well"
            found.said.append(f"{text}. Likelihood and calibration are of all rows, which flatters the model.")
            found.warnings.append(f"{text}: likelihood and calibration flatter the model.")
    if train is not None:
        found.said.append(f"The other densities learnt from {_n(len(learn.x) if learn else 0, 'row')} of {train}.")
    elif held.possible.sum() >= 2 * LEAST:
        text = "The other densities learn from one half of the rows and are judged on the other, and vice versa."
        text += " So they know rows of this very file, which the model does not." if found.kind == "new" else ""
        found.said.append(f"{text} With --train FILE they learn from that, such as the table of the fit.")


def _compare(found: Report, flow: TableFlow, learn: Rows | None, held: Rows, rng: np.random.Generator) -> None:
    """The other densities beside the model, on the same rows: all of them that are possible."""
    possible = np.flatnonzero(held.possible)
    if found.kind == "learnt" or not len(possible):
        return
    folds = [(learn, possible)]
    if learn is None:
        halves = np.array_split(rng.permutation(possible), 2)
        folds = [(_at(held, a), b) for a, b in (halves, halves[::-1])]
    if min(0 if rows is None else len(rows.x) for rows, _ in folds) < LEAST:
        found.said.append(f"There are fewer than {LEAST} rows for other densities to learn from: no comparison.")
        return
    ours = found.scores
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, str]]] = {}
    for rows, places in folds:
        for peer in peers(flow, _tensors(flow, rows), _tensors(flow, _at(held, places))):  # type: ignore[arg-type]
            nats = peer.log_prob.double().numpy()
            parts.setdefault(peer.name, []).append((nats, ours[places] - nats, peer.choice))
    found.compared = len(possible)
    for name, several in parts.items():
        nats, ahead = (np.concatenate([part[i] for part in several]) for i in (0, 1))
        if len(nats) < len(possible):  # few rows in one half: another kind of peer
            continue
        (mean, error), (difference, difference_error) = _mean(nats), _mean(ahead)
        choice = " and ".join(dict.fromkeys(part[2] for part in several))
        found.peers.append(
            {"name": name, "choice": choice, "nats": mean, "standard_error": error, "ahead": difference}
            | {"ahead_error": difference_error}
        )


def _calibrate(
    found: Report, flow: TableFlow, held: Rows, rng: np.random.Generator, generator: torch.Generator
) -> None:
    """Latents of the rows judged, and how many rows regions of a stated probability hold."""
    possible = _possible(held)
    if flow.schema.numbers and len(possible.x):
        found.latents = flow.latents(*_tensors(flow, possible), generator=generator).double().numpy()
    n, d = found.latents.shape
    if n and d:
        radius = torch.as_tensor((found.latents**2).sum(1) / 2)
        found.central = np.ones(found.judged)
        found.central[held.possible] = torch.special.gammainc(torch.full_like(radius, d / 2), radius).numpy()
    # Equal densities, as tables of categories have them, are in an order of chance.
    draws, scores = np.sort(found.draw_scores.round(9)), found.scores.round(9)
    less, most = (np.searchsorted(draws, scores, side) / len(draws) for side in ("left", "right"))
    found.densest = 1 - (less + rng.random(len(scores)) * (most - less))
    for level in LEVELS:
        noise = level * (1 - level) / found.judged
        entry: dict[str, Any] = {"level": level, "density": float((found.densest <= level).mean())}
        entry["density_error"] = math.sqrt(noise * (1 + found.judged / len(draws)))
        if len(found.central):
            entry |= {"latents": float((found.central <= level).mean()), "latents_error": math.sqrt(noise)}
        found.coverage.append(entry)


def _marginal(column: Column, rows: np.ndarray, draws: np.ndarray) -> Look:
    """Rows and draws of a column, and how far apart they are."""
    n, m = len(rows), len(draws)
    if column.kind == "category":
        shares = np.array([[(part == value).mean() for value in column.values] for part in (rows, draws)])
        # A count of each category has a deviation of its own.
        spread = np.sqrt(shares[1] * (1 - shares[1]) * (1 / n + 1 / m)).sum() / 2
        return Look(column.name, rows, draws, float(np.abs(shares[0] - shares[1]).sum() / 2), 3.3 * float(spread))
    places = np.sort(np.concatenate([rows, draws]))
    below = [np.searchsorted(np.sort(part), places, side="right") / len(part) for part in (rows, draws)]
    return Look(column.name, rows, draws, float(np.abs(below[0] - below[1]).max()), 1.95 * math.sqrt(1 / n + 1 / m))


def _pair(found: Report, columns: list[Column]) -> None:
    """The pairs of columns that depend most on each other: mutual information of eight bins each, in nats."""
    columns = columns[:PAIRED]
    if found.rows < 20:
        return
    found.paired = len(columns)
    codes = [_bins(c, found.table[c.name], found.draws[c.name]) for c in columns]
    pairs = [
        (a, b, _dependence(codes[i][0], codes[j][0]), _dependence(codes[i][1], codes[j][1]))
        for i, a in enumerate(columns)
        for j, b in enumerate(columns[:i])
    ]
    found.pairs = sorted((pair for pair in pairs if pair[2] >= DEPENDENT), key=lambda pair: -pair[2])[: SHOWN["pairs"]]


def _bins(column: Column, rows: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both by the same eight bins, of as many rows each; of categories the most frequent seven, and the rest."""
    if column.kind == "category":
        often = sorted(column.values, key=lambda value: -int((rows == value).sum()))[:7]
        places = {value: i for i, value in enumerate(often)}
        a, b = (np.array([places.get(value, 7) for value in part.tolist()]) for part in (rows, draws))
        return a, b
    edges = np.unique(np.quantile(rows, np.arange(1, 8) / 8))
    return np.searchsorted(edges, rows), np.searchsorted(edges, draws)


def _dependence(a: np.ndarray, b: np.ndarray) -> float:
    """Mutual information of two columns of codes, less what chance adds on average (Miller and Madow); at least 0."""
    joint = np.bincount(a * 8 + b, minlength=64).reshape(8, 8) / len(a)
    product = joint.sum(1, keepdims=True) * joint.sum(0)
    some = joint > 0
    nats = float((joint[some] * np.log(joint[some] / product[some])).sum())
    freedom = ((joint.sum(1) > 0).sum() - 1) * ((joint.sum(0) > 0).sum() - 1)
    return max(0.0, nats - float(freedom) / (2 * len(a)))


def _surprises(flow: TableFlow, table: Table, rows: Rows, scores: np.ndarray, numbers: np.ndarray) -> list[Surprise]:
    """The rows of lowest density, and what each column has to do with it."""
    columns = [*flow.schema.numbers, *flow.schema.labels]
    chosen = np.argsort(scores, kind="stable")[: SHOWN["rows"]]
    possible = chosen[rows.possible[chosen]]
    found = []
    shortfall: dict[int, np.ndarray] = {}
    if len(possible):
        parts = _by_order(flow, rows, possible) if flow.in_one_order else _by_column(flow, rows, possible, scores)
        shortfall = dict(zip(possible.tolist(), parts, strict=True))
    for row in chosen.tolist():
        if row in shortfall:
            order = np.argsort(-shortfall[row], kind="stable")[:4]
            named = [(columns[j].name, _plain(table[columns[j].name][row]), float(shortfall[row][j])) for j in order]
            named = [part for part in named if part[2] >= 0.5] or named[:1]
        else:
            # Outside of the bounds, or a category that was not seen.
            wrong = [c for c in columns if not _allows(c, table[c.name][row])]
            named = [(c.name, _plain(table[c.name][row]), math.inf) for c in wrong]
        values = {name: _plain(column[row]) for name, column in table.items()}
        found.append(Surprise(int(numbers[row]), float(scores[row]), named, values))
    return found


def _allows(column: Column, value: Any) -> bool:
    return value in column.values if column.kind == "category" else not column.outside(np.array([value])).any()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _by_order(flow: TableFlow, rows: Rows, chosen: np.ndarray) -> np.ndarray:
    """How far the factor of each column is below its mean over the rows: (k, columns)."""
    x, context = _tensors(flow, _possible(rows))
    places = np.arange(0, len(x), 4096)
    usual = torch.cat(
        [flow.terms(x[i : i + 4096], None if context is None else context[i : i + 4096]) for i in places.tolist()]
    ).mean(0)
    return (usual - flow.terms(*_tensors(flow, _at(rows, chosen)))).double().numpy()


def _by_column(flow: TableFlow, rows: Rows, chosen: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """How many nats a row would gain if one column had its best value of 33: (k, columns)."""
    gains = np.zeros((len(chosen), rows.x.shape[1]))
    usual = rows.x[rows.possible]
    for j in range(gains.shape[1]):
        values = np.unique(np.quantile(usual[:, j], np.linspace(0, 1, 33), method="nearest"))
        x = rows.x[chosen].repeat(len(values), axis=0)
        x[:, j] = np.tile(values, len(chosen))
        context = None if rows.context is None else rows.context[chosen].repeat(len(values), axis=0)
        best = flow.score_rows(x, context).reshape(len(chosen), -1).max(1)
        gains[:, j] = np.maximum(best - scores[chosen], 0)
    return gains


def _warn(found: Report, flow: TableFlow) -> None:
    """What a reader should know before trusting the rest."""
    warn, history = found.warnings.append, found.history
    for column in flow.schema.numbers:
        values = found.table[column.name]
        most = int(np.unique(values, return_counts=True)[1].max())
        if not column.step and len(values) >= 20 and most >= ATOM * len(values):
            warn(
                f"Column {column.name!r}: one value is in {most} of {len(values)} rows, where numbers have no density. "
                "Give the step of its values, declare it a category, or leave it out."
            )
    if found.impossible:
        warn(
            f"Impossible under the model: {found.impossible:,} of {_n(found.judged, 'row')}, beyond its bounds or with "
            "categories that it has not seen. The mean log-likelihood is minus infinity; it is told of the others."
        )
    learnt = int(flow.notes.get("rows", 0) * (1 - flow.notes.get("held_out", 0)))
    needed = 20 * (len(flow.schema.numbers) + sum(len(c.values) - 1 for c in flow.schema.labels))
    if learnt and learnt < max(100, needed):
        warn(
            f"The model learnt from {_n(learnt, 'row')}, few for {_n(len(flow.schema.columns), 'column')}: what it "
            "says of single rows is uncertain."
        )
    if found.judged < 100:
        warn(f"Few rows to judge by: {found.judged}. Calibration and differences are uncertain.")
    if None not in (found.training_nats, found.nats, found.training_error, found.standard_error):
        gap = found.training_nats - found.nats  # type: ignore[operator]
        noise = math.hypot(found.training_error, found.standard_error)  # type: ignore[arg-type]
        if gap > 3 * noise and gap > 0.02 * len(found.columns):
            warn(
                f"Overfitting: rows that were learnt from have {gap:.2f} nats more than those held out "
                f"(± {noise:.2f}). More rows, a smaller model or fewer steps would close the gap."
            )
    if history and history.stopped in ("interrupted", "diverged"):
        warn(f"The training was not finished: {history.stopped}.")
    for peer in found.peers:
        if peer["ahead_error"] is not None and peer["ahead"] < -max(2 * peer["ahead_error"], 0.01):
            ahead = f"{-peer['ahead']:.2f} ± {peer['ahead_error']:.2f}"
            warn(f"The model is not as good as the {peer['name']}, by {ahead} nats.")
    for entry in found.coverage:
        off = entry["density"] - entry["level"]
        if entry["level"] == 0.9 and abs(off) > max(0.03, 3.3 * entry["density_error"]):
            why = "too wide" if off > 0 else "too narrow, as one that overfits, or these are other data than it knows"
            warn(f"Calibration: the region of 90% probability holds {entry['density']:.1%} of the rows: it is {why}.")
    if far := [look for look in found.columns if look.distance > look.noise + 0.03]:
        far.sort(key=lambda look: -look.distance)
        shown = ", ".join(f"{look.name!r} ({look.distance:.2f})" for look in far[:5])
        warn(f"Draws differ from the rows in {shown}{' and more' * (len(far) > 5)}: see the pictures of the columns.")


def _n(count: int, what: str) -> str:
    """
    >>> _n(1, "row"), _n(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"
