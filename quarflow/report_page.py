"""The page of `quarflow.report`: one HTML file with its style and pictures inside; nothing from outside, no script.

Pictures are small SVGs whose colours are variables of the page's style, so that they follow it into the dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quarflow.tables import Column

if TYPE_CHECKING:
    from quarflow.report import Look, Report, Surprise

WIDTH, WIDE = 320, 400  # of pictures, three or two beside each other; on the page they are about as wide
HEIGHT = 200
DOTS = 600  # of a scatter plot
LISTED = 60  # columns in the table of columns, and values of a row
SHOWN = 24  # columns with a picture

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --card: #fff; --ink: #1d2329; --soft: #5b6670; --line: #e2e4e1;
  --data: #2a6f97; --model: #c8553d; --other: #8a63a8; --alert: #8a5a00; --alert-back: #fdf3dc; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181b; --card: #1b2024; --ink: #e4e7e5; --soft: #9aa5ab;
  --line: #30373c; --data: #6db6dc; --model: #ef8f74; --other: #c4a0e0; --alert: #f0c674; --alert-back: #2c2616; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; line-height: 1.3; letter-spacing: -.01em; margin: 3.2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 0; }
p { max-width: 44rem; margin: .5rem 0; }
.soft, figcaption, th { color: var(--soft); }
.tiles, .grid { display: grid; gap: 1rem; margin: 1.25rem 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(13.5rem, 1fr)); }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(18.5rem, 100%), 1fr)); }
.grid.wide { grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1rem; margin: 0;
  min-width: 0; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; letter-spacing: -.02em; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.tile span, figcaption, .small { font-size: .84rem; line-height: 1.45; }
.tile span { display: block; color: var(--soft); }
figcaption { margin-top: .3rem; }
figure h3 { margin-bottom: .35rem; }
.two { display: grid; gap: 1rem 2.5rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  align-items: start; margin: 1rem 0; }
.two > div > :first-child { margin-top: 0; }
.alerts { list-style: none; margin: 1.25rem 0; padding: 0; display: grid; gap: .5rem; }
.alerts li { background: var(--alert-back); border-left: 3px solid var(--alert); border-radius: .3rem;
  padding: .55rem .85rem; font-size: .92rem; line-height: 1.5; }
.scroll { overflow-x: auto; margin: 1rem 0; max-width: 44rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: break-word; }
th, td { text-align: left; padding: .42rem 1.2rem .42rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; font-size: .82rem; }
td.n, th.n { text-align: right; }
td.n { white-space: nowrap; }
tr > :last-child { padding-right: 0; }
tr.ours td { font-weight: 600; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
svg text.name { fill: var(--ink); }
.grid-line { stroke: var(--line); stroke-width: 1; }
.guide { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; fill: none; opacity: .8; }
.band { fill: var(--soft); opacity: .16; }
.data, .model, .other { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.data { stroke: var(--data); } .model { stroke: var(--model); } .other { stroke: var(--other); }
.thin { stroke-width: 1; opacity: .4; }
.fill-data { fill: var(--data); opacity: .32; } .fill-model { fill: var(--model); opacity: .85; }
.dots { stroke-width: 2.6; stroke-linecap: round; opacity: .65; fill: none; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: .2em; margin-right: .35em; }
.named { white-space: nowrap; }
.key.d { background: var(--data); } .key.m { background: var(--model); } .key.o { background: var(--other); }
.rows { list-style: none; margin: 1rem 0; padding: 0; display: grid; gap: .6rem; }
.rows .head { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; align-items: baseline; }
.rows .head b { font-weight: 600; }
.why { display: flex; flex-wrap: wrap; gap: .35rem .5rem; margin: .45rem 0 .2rem; }
.why span { border: 1px solid var(--line); border-radius: .4rem; padding: .05rem .55rem; font-size: .88rem; }
.why i { font-style: normal; color: var(--model); font-variant-numeric: tabular-nums; white-space: nowrap; }
details { font-size: .86rem; color: var(--soft); } summary { cursor: pointer; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: .84rem;
  color: var(--soft); }
@media (max-width: 30rem) { main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.55rem; } h2 { margin-top: 2.4rem; }
  table { font-size: .82rem; } th, td { padding-right: .7rem; } }
@media print { .card, .alerts li { break-inside: avoid; } }
"""

STOPPED = {
    "max_steps": "all of its steps were done",
    "max_seconds": "its time was up",
    "early stopping": "the rows held out no longer became likelier",
    "interrupted": "it was interrupted",
    "diverged": "the loss was no longer finite",
}


def page(report: Report) -> str:
    """The HTML of a report."""
    from quarflow import __version__

    parts = [_head(report), _alerts(report), _fit(report), _likelihood(report), _calibration(report)]
    parts += [_columns(report), _pairs(report), _surprising(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.model)}: density report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n<footer>quarflow {escape(__version__)}. Log-likelihoods are natural logarithms (nats) of densities in "
        "the units of the table: probabilities of categories and whole numbers, densities of other numbers.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


# The sections


def _head(r: Report) -> str:
    judged = {"new": "held-out rows", "held out": "held-out rows", "learnt": "rows learnt from"}.get(r.kind, "rows")
    nats = "−∞" if r.nats is None else _signed(r.nats)
    tiles = [(nats, f"{_error(r.standard_error)} nats for each row: mean log-likelihood of {r.judged:,} {judged}")]
    if r.peers:
        best = max(r.peers, key=lambda peer: peer["nats"])
        ahead = _signed(best["ahead"], plus=True)
        tiles.append((ahead, f"{_error(best['ahead_error'])} nats beside the best other density ({best['name']})"))
    if r.judged:
        entry = next(e for e in r.coverage if e["level"] == 0.9)
        tiles.append((f"{entry['density']:.1%}", "of these rows lie in the model’s region of 90% probability"))
    size = f"{_plural(r.rows_in_file, 'row')} in the file, {_n(len(r.flow.schema.columns), 'column')}"
    tiles.append((f"{r.rows_in_file:,}", size))
    return (
        f"<header><h1>{escape(r.model)}</h1>\n<p class=soft>A density of a table, and the rows of "
        f"{escape(r.data)}</p></header>\n<div class=tiles>"
        + "".join(f"<div class='card tile'><b>{value}</b><span>{escape(said)}</span></div>" for value, said in tiles)
        + "</div>"
    )


def _alerts(r: Report) -> str:
    if not r.warnings:
        return "<section id=warnings><p>Nothing to warn of.</p></section>"
    items = "".join(f"<li>{escape(text)}</li>" for text in r.warnings)
    return f"<section id=warnings aria-label=Warnings><ul class=alerts>{items}</ul></section>"


def _fit(r: Report) -> str:
    schema, history = r.flow.schema, r.history
    config: Any = r.flow.config
    kinds = [(len(schema.numbers), "numbers"), (len(schema.labels), "categories")]
    of = " and ".join(f"{_n(count, 'column')} of {what}" for count, what in kinds if count)
    given = f", given {', '.join(c.name for c in schema.given)}" if schema.given else ""
    parameters = _n(sum(p.numel() for p in r.flow.parameters()), "parameter")
    words = [f"The model is a density of {of}{given}. It has {parameters}."]
    if schema.numbers:
        options = dict(getattr(config, "flow", {}))
        kind = options.pop("model", "flow")
        settings = ", ".join(f"{k} = {v}" for k, v in options.items())
        words.append(f"The flow of the numbers is a {kind}{f' ({settings})' * bool(settings)}.")
    learnt, held = r.flow.notes.get("rows", 0), r.flow.notes.get("held_out", 0)
    if history:
        steps = history.steps[-1] if history.steps else 0
        said = f"It was fitted to {_n(learnt, 'row')}" + (f", {held:.0%} of them held out" if held else "")
        why = STOPPED.get(history.stopped or "", "it ended")
        words.append(f"{said}, in {_n(steps, 'step')} and {history.seconds:.0f} s. The training stopped because {why}.")
        if history.best_step is not None:
            words.append(
                f"The weights are those of step {history.best_step:,}, under which the rows held out were likeliest."
            )
            if history.stopped == "max_steps" and history.best_step >= 0.95 * steps:
                words.append("They were still becoming likelier: more steps may help.")
    else:
        words.append("The model’s file does not say how it was fitted.")
    looked = f"For this page, {_n(r.rows, 'row')} of {r.data}"
    looked += f", drawn at random from {r.rows_in_file:,}," if r.rows < r.rows_in_file else ""
    words.append(f"{looked} {'were' if r.rows != 1 else 'was'} looked at.")
    curve = ""
    if history and max(len(history.steps), len(history.validation)) > 1:
        said = f"Mean log-likelihood of {_key('d', 'the')} rows learnt from and {_key('m', 'those')} held out."
        curve = _figure("Training", _training(r), said)
    listed = "".join(
        f"<tr><td>{escape(c.name)}</td><td>{escape(c.in_words)}</td></tr>" for c in schema.columns[:LISTED]
    )
    more = len(schema.columns) - LISTED
    return (
        "<section id=fit><h2>The fit</h2><div class=two><div>"
        + "".join(f"<p>{escape(text)}</p>" for text in words)
        + f"</div>{curve}</div><div class=scroll><table><thead><tr><th>Column</th><th>found to be</th></tr></thead>"
        f"<tbody>{listed}</tbody></table></div>"
        + (f"<p class=soft>And {more:,} more columns.</p>" if more > 0 else "")
        + "</section>"
    )


def _likelihood(r: Report) -> str:
    said = "".join(f"<p>{escape(text)}</p>" for text in r.said)
    title = "Held-out log-likelihood" if r.kind in ("new", "held out") else "Log-likelihood"
    head = f"<section id=likelihood><h2>{title}</h2>{said}"
    if r.nats is None:
        return head + "<p>No row is possible under the model, so there is nothing to compare.</p></section>"
    ours = {"name": r.model, "choice": "", "nats": r.nats, "standard_error": r.standard_error, "ahead": None}
    entries = sorted([ours, *r.peers], key=lambda e: -e["nats"])
    rows = "".join(
        f"<tr{' class=ours' * (e is ours)}><td>{escape(e['name'])}"
        + (f" <span class=soft>({escape(e['choice'])})</span>" if e["choice"] else "")
        + f"</td><td class=n>{_signed(e['nats'])} {_error(e['standard_error'])}</td><td class=n>"
        + ("" if e["ahead"] is None else f"{_signed(-e['ahead'], plus=True)} {_error(e['ahead_error'])}")
        + "</td></tr>"
        for e in entries
    )
    label = "Rows learnt from" if r.kind == "learnt" else "Rows held out" if r.kind != "unknown" else "Rows"
    table = (
        f"<div class=scroll><table><thead><tr><th>{label}</th><th class=n>nats for each row</th>"
        f"<th class=n>beside the model</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
    notes = []
    if r.label_nats is not None and r.flow.schema.numbers:
        notes.append(
            f"Of the model’s {_signed(r.nats)} nats, {_signed(r.label_nats)} are of the categories and "
            f"{_signed(r.nats - r.label_nats)} of the numbers given them."
        )
    if r.training_nats is not None:
        notes.append(
            f"Rows that {'the model' if r.fit_rows else 'the other densities'} learnt from have "
            f"{_signed(r.training_nats)} {_error(r.training_error)} nats under the model: a gap of "
            f"{_signed(r.training_nats - r.nats, plus=True)}."
        )
    if r.peers:
        notes.append(
            "The differences are taken row by row, which makes their errors smaller than those of the means. Each "
            "density was chosen (components, bandwidth) by a fifth of the rows that it learnt from. Bounds, heavy "
            "tails and whole numbers are treated as they are for the model; the numbers are given the categories and "
            "the columns that are given; categories themselves count by their frequencies."
        )
    if r.impossible:
        notes.append(f"{_n(r.impossible, 'row')} that the model holds impossible left out.")
    picture = (
        _figure("Log-likelihood", _ranking(entries, ours), "Means, with two standard errors to each side.")
        if r.peers
        else ""
    )
    text = "".join(f"<p class=small>{escape(note)}</p>" for note in notes)
    if not picture:
        return f"{head}{table}{text}</section>"
    return f"{head}<div class=two><div>{table}</div>{picture}</div>{text}</section>"


def _calibration(r: Report) -> str:
    head = (
        "<section id=calibration><h2>Calibration</h2><p>A model that is right gives each event the frequency that it "
        "has. Its latents, the noise that rows stand for, are then independent normals, their probabilities are "
        "uniform, and a region of 90% probability holds 90% of new rows.</p>"
    )
    if r.judged < 20 or r.judged == r.impossible:
        return head + f"<p>{_n(r.judged - r.impossible, 'row')}: too few to say.</p></section>"
    pictures = []
    if r.latents.size:
        said = f"Quantiles of {_key('d', 'all')} latents together and of {_key('o', 'each')}. Right is the diagonal."
        pictures.append(("Latents against a normal", _quantiles(r.latents), said))
        said = "How often a latent falls into each twentieth of its probability. Right is the band, but for chance."
        pictures.append(("Probability-integral transforms", _uniform(r.latents), said))
    said = f"The part of rows in {_key('d', 'the')} densest region of each probability"
    said += f" and in {_key('o', 'the')} central one of the latents" if r.central.size else ""
    pictures.append(("Coverage", _coverage(r), f"{said}. Right is the diagonal."))
    scores = _histogram(r.scores[np.isfinite(r.scores)], r.draw_scores, width=WIDE, height=240)
    said = f"Of {_key('d', 'rows')} and {_key('m', 'draws')} of the model. Rows left of the draws are outliers."
    pictures.append(("Log-density", scores, said))
    figures = "".join(_figure(*picture) for picture in pictures)
    rows = "".join(
        f"<tr><td>{e['level']:.0%}</td><td class=n>{e['density']:.1%} ± {e['density_error']:.1%}</td>"
        + (f"<td class=n>{e['latents']:.1%} ± {e['latents_error']:.1%}</td>" if "latents" in e else "")
        + "</tr>"
        for e in r.coverage
    )
    central = "<th class=n>in the central region of latents</th>" if r.central.size else ""
    return (
        f"{head}<div class='grid wide'>{figures}</div><div class=scroll><table><thead><tr><th>Probability</th>"
        f"<th class=n>rows in the densest region</th>{central}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def _columns(r: Report) -> str:
    looks = r.columns
    said = (
        "Pictures show the middle 99% of the rows. A distance is the largest difference of cumulated shares, and of "
        "categories half the sum of all differences: 0 is the same, 1 is nothing in common."
    )
    if len(looks) > SHOWN:
        looks = sorted(looks, key=lambda look: -look.distance)[:SHOWN]
        said += f" Of {len(r.columns):,} columns, the {SHOWN} with the largest distances are shown."
    by_name = {c.name: c for c in r.flow.schema.columns}
    figures = "".join(
        _figure(look.name, _marginal(by_name[look.name], look), f"distance {look.distance:.3f}") for look in looks
    )
    return f"<section id=columns><h2>Each column</h2><p>{said}</p>{_legend()}<div class=grid>{figures}</div></section>"


def _pairs(r: Report) -> str:
    if len(r.columns) < 2 or not r.paired:
        return ""
    if not r.pairs:
        return "<section id=pairs><h2>Pairs</h2><p>No two columns depend on each other noticeably.</p></section>"
    rng = np.random.default_rng(0)
    figures = ""
    for *pair, of_rows, of_draws in r.pairs:
        # Names of categories have room beside the second axis.
        a, b = sorted(pair, key=lambda column: column.kind == "category")
        caption = f"{of_rows:.2f} nats in the rows, {of_draws:.2f} in draws"
        figures += _figure(f"{a.name} and {b.name}", _scatter(a, b, r, rng), caption)
    among = f" among the first {r.paired} columns" if r.paired < len(r.columns) else ""
    return (
        f"<section id=pairs><h2>Pairs</h2><p>The pairs{among} that depend most on each other, by mutual information: "
        f"rows left, draws of the model right.</p>{_legend()}<div class=grid>{figures}</div></section>"
    )


def _surprising(r: Report) -> str:
    if not r.surprises:
        return ""
    how = (
        "The model takes the columns in one order, and its log-density is a sum with a term for each, given those "
        "before. Columns are named with the nats by which their term is below its mean over the rows."
        if r.by_order
        else "The model has no single order of columns, so its log-density is no sum of terms for each. Columns are "
        "named with the nats that the row would gain if this column alone had the best of 33 usual values."
    )
    items = "".join(_row(s) for s in r.surprises)
    return (
        f"<section id=surprising><h2>The most surprising rows</h2><p>Of lowest density among {_n(r.rows, 'row')}. "
        f"{how}</p><ol class=rows>{items}</ol></section>"
    )


def _row(s: Surprise) -> str:
    why = "".join(
        f"<span>{escape(name)} = {escape(_value(value))} "
        f"<i>{'impossible' if math.isinf(nats) else _signed(nats, places=1)}</i></span>"
        for name, value, nats in s.columns
    )
    if s.columns and max(nats for *_, nats in s.columns) < 2:
        why = "<span class=soft>no column alone explains it</span>" + why
    values = [f"{escape(name)} = {escape(_value(value))}" for name, value in s.values.items()]
    more = [f"and {len(values) - LISTED} more"] if len(values) > LISTED else []
    nats = "−∞" if math.isinf(s.nats) else _signed(s.nats, places=2)
    listed = ", ".join([*values[:LISTED], *more])
    return (
        f"<li class=card><div class=head><b>Row {s.number:,}</b><span class=soft>log-density {nats}</span></div>"
        f"<div class=why>{why}</div><details><summary>All values</summary>{listed}</details></li>"
    )


def _figure(title: str, picture: str, caption: str) -> str:
    return f"<figure class=card><h3>{escape(title)}</h3>{picture}<figcaption>{caption}</figcaption></figure>"


def _legend() -> str:
    return f"<p class='small soft'>{_key('d', 'rows')} &nbsp; {_key('m', 'draws')} of the model</p>"


def _key(kind: str, word: str) -> str:
    """The colour of something, and the word for it, on one line."""
    return f"<span class=named><span class='key {kind}'></span>{word}</span>"


# Numbers in text


def _signed(value: float, plus: bool = False, places: int = 3) -> str:
    """
    >>> _signed(-1.23456), _signed(0.5, plus=True), _signed(1234.5, places=1)
    ('−1.235', '+0.500', '1,234.5')
    """
    value = round(value, places) + 0.0  # no minus before a zero
    return f"{value:{'+' if plus else ''},.{places}f}".replace("-", "−")


def _error(value: float | None) -> str:
    return "" if value is None else f"± {value:.3f}"


def _value(value: Any) -> str:
    return f"{value:.6g}".replace("-", "−") if isinstance(value, float) else str(value)


def _n(count: int, what: str) -> str:
    return f"{count:,} {_plural(count, what)}"


def _plural(count: int, what: str) -> str:
    return what + "s" * (count != 1)


# Pictures


class Chart:
    """Axes of a picture, and what is drawn in them.

    >>> chart = Chart((0, 1), (0, 10), ylabel="nats")
    >>> chart.line([0, 1], [0, 10], "data")
    >>> chart.svg("a line").startswith("<svg")
    True
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: int = WIDTH,
        height: int = HEIGHT,
        margins: tuple[float, float, float, float] = (42, 8, 8, 36),
        xlabel: str = "",
        ylabel: str = "",
        xticks: Sequence[tuple[float, str]] | None = None,
        yticks: Sequence[tuple[float, str]] | None = None,
    ) -> None:
        self.span = [_opened(*x), _opened(*y)]
        self.size = width, height
        left, top, right, bottom = margins
        right, bottom = width - right, height - bottom
        self.box = left, top, right, bottom
        self.parts: list[str] = []
        for value, text in ticks(*self.span[1]) if yticks is None else yticks:
            place = self.y(value)
            self.parts.append(f"<path class=grid-line d='M{left:.1f} {place:.1f}H{right:.1f}'/>")
            self.text(left - 6, place + 4, text, "end")
        self.parts.append(f"<path class=grid-line d='M{left:.1f} {bottom:.1f}H{right:.1f}'/>")
        for value, text in fitting(*self.span[0], right - left) if xticks is None else xticks:
            self.text(self.x(value), bottom + 15, text, "middle")
        self.text((left + right) / 2, bottom + 31, xlabel, "middle")
        if ylabel:
            middle = (top + bottom) / 2
            self.parts.append(
                f"<text transform='translate(10 {middle:.1f}) rotate(-90)' text-anchor=middle>{ylabel}</text>"
            )

    def x(self, value: float) -> float:
        """Where a value of the first axis is in the picture."""
        (low, high), (left, _, right, _) = self.span[0], self.box
        return left + (right - left) * min(max((value - low) / (high - low), -0.05), 1.05)

    def y(self, value: float) -> float:
        """Where a value of the second axis is in the picture; upwards."""
        (low, high), (_, top, _, bottom) = self.span[1], self.box
        return bottom - (bottom - top) * min(max((value - low) / (high - low), -0.05), 1.05)

    def line(self, xs: Iterable[float], ys: Iterable[float], kind: str) -> None:
        """A line through points."""
        points = " ".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
        self.parts.append(f"<path class='{kind}' d='M{points}'/>")

    def dots(self, xs: Iterable[float], ys: Iterable[float], kind: str) -> None:
        """A dot at each point within the axes."""
        (x0, x1), (y0, y1) = self.span
        seen = [(x, y) for x, y in zip(xs, ys, strict=True) if x0 <= x <= x1 and y0 <= y <= y1]
        points = "".join(f"M{self.x(x):.1f} {self.y(y):.1f}h0" for x, y in seen)
        self.parts.append(f"<path class='{kind} dots' d='{points}'/>")

    def bar(self, x: tuple[float, float], y: tuple[float, float], kind: str) -> None:
        """A rectangle between two values of each axis."""
        (a, b), (c, d) = sorted(map(self.x, x)), sorted(map(self.y, y))
        self.parts.append(f"<rect class='{kind}' x='{a:.1f}' y='{c:.1f}' width='{b - a:.1f}' height='{d - c:.1f}'/>")

    def steps(self, edges: np.ndarray, heights: np.ndarray, kind: str) -> None:
        """The outline of a histogram."""
        ys = np.repeat(np.concatenate([[0.0], heights, [0.0]]), 2)[1:-1]
        self.line(np.repeat(edges, 2).tolist(), ys.tolist(), kind)

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Text at a place of the picture."""
        if text:
            shown = f" class={kind}" if kind else ""
            self.parts.append(f"<text{shown} x='{x:.1f}' y='{y:.1f}' text-anchor={anchor}>{escape(text)}</text>")

    def svg(self, title: str) -> str:
        """The picture; ``title`` is for those who cannot see it."""
        width, height = self.size
        return f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{escape(title)}'>{''.join(self.parts)}</svg>"


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Round numbers within a range, at most so many, with their text.

    >>> ticks(-0.2, 1.1)
    [(0.0, '0'), (0.5, '0.5'), (1.0, '1.0')]
    """
    exponent = math.floor(math.log10((high - low) / most))
    for step in (m * 10.0 ** (exponent + e) for e in range(3) for m in (1, 2, 5)):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            break
    places = [i * step for i in range(first, last + 1)]
    large = max(map(abs, places), default=0.0)
    if large >= 1e7 or large < 1e-3:
        return [(v, _value(float(f"{v:.3g}"))) for v in places]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    comma = "," * (large >= 10_000)  # a year has none
    return [(v, f"{v:{comma}.{digits}f}".replace("-", "−") if v else "0") for v in places]


def fitting(low: float, high: float, width: float) -> list[tuple[float, str]]:
    """As many `ticks` as have room for their text on a horizontal axis of that width, at most 6.

    >>> [len(fitting(0, 150_000, width)) for width in (100, 300)]
    [2, 4]
    """
    for most in range(6, 1, -1):
        found = ticks(low, high, most)
        needed = 6.5 * max((len(text) for _, text in found), default=0) + 8
        if len(found) < 2 or width * (found[1][0] - found[0][0]) / abs(high - low) >= needed:
            return found
    return ticks(low, high, 1)


def _opened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    if abs(high - low) > 1e-9 * max(abs(low), abs(high), 1e-300):
        return float(low), float(high)
    room = 0.5 * abs(low) or 0.5
    return low - room, low + room


def _training(r: Report) -> str:
    history: Any = r.history
    keep = np.unique(np.linspace(0, len(history.steps) - 1, 300).astype(int))
    steps, nats = np.array(history.steps)[keep], -np.array(history.loss)[keep]
    seen = np.sort([v for v in [*nats, *history.validation] if math.isfinite(v)])
    if not len(seen):
        return ""
    # The first steps may be worse by orders of magnitude; the picture is about the rest.
    low, high = seen[len(seen) // 20], seen[-1]
    room = 0.08 * (high - low)
    chart = Chart(
        (0, steps[-1]),
        (low - room, high + room),
        xlabel="step",
        ylabel="nats",
        width=WIDE,
        height=230,
        margins=(58, 8, 10, 36),
    )
    good = np.isfinite(nats) & (nats >= low - room)
    chart.line(steps[good].tolist(), nats[good].tolist(), "data")
    points = [(s, v) for s, v in zip(history.validation_steps, history.validation, strict=True) if v >= low - room]
    if points:
        chart.line([s for s, _ in points], [v for _, v in points], "model")
    if history.best_step is not None and history.best_validation is not None:
        x, y = chart.x(history.best_step), chart.y(history.best_validation)
        chart.parts.append(f"<circle class=fill-model cx='{x:.1f}' cy='{y:.1f}' r='4'/>")
    return chart.svg("training curve")


def _ranking(entries: list[dict[str, Any]], ours: dict[str, Any]) -> str:
    errors = [2 * (e["standard_error"] or 0) for e in entries]
    low = min(e["nats"] - error for e, error in zip(entries, errors, strict=True))
    high = max(e["nats"] + error for e, error in zip(entries, errors, strict=True))
    room = 0.05 * (high - low)
    size: Any = {"width": WIDE, "height": 34 * len(entries) + 44, "margins": (118, 6, 10, 36)}
    chart = Chart((low - room, high + room), (len(entries) - 0.5, -0.5), yticks=[], xlabel="nats for each row", **size)
    for i, (e, error) in enumerate(zip(entries, errors, strict=True)):
        kind = "model" if e is ours else "data"
        chart.parts.append(f"<path class=grid-line d='M118 {chart.y(i):.1f}H{WIDE - 10}'/>")
        chart.line([e["nats"] - error, e["nats"] + error], [i, i], kind)
        chart.parts.append(
            f"<circle fill='var(--{kind})' cx='{chart.x(e['nats']):.1f}' cy='{chart.y(i):.1f}' r='4.5'/>"
        )
        chart.text(110, chart.y(i) + 4, _short(e["name"], 17), "end", "name")
    return chart.svg("log-likelihoods")


def _quantiles(latents: np.ndarray) -> str:
    n, d = latents.shape
    least = max(0.5 / latents.size, 1e-5)
    chart = Chart((-4, 4), (-4, 4), xlabel="normal quantile", ylabel="latent", width=WIDE, height=240)
    chart.line([-4, 4], [-4, 4], "guide")
    for j in range(d if d <= 30 else 0):
        p = np.clip(np.linspace(0, 1, 41), 0.5 / n, 1 - 0.5 / n)
        chart.line(_normal(p), np.quantile(latents[:, j], p).tolist(), "other thin")
    p = np.array([float(torch.special.ndtr(torch.tensor(v))) for v in np.linspace(-4, 4, 65)])
    p = p[(p >= least) & (p <= 1 - least)]
    chart.line(_normal(p), np.quantile(latents, p).tolist(), "data")
    return chart.svg("quantiles of latents against those of a normal")


def _normal(p: np.ndarray) -> list[float]:
    return torch.special.ndtri(torch.as_tensor(p)).tolist()


def _uniform(latents: np.ndarray) -> str:
    counts = np.histogram(torch.special.ndtr(torch.as_tensor(latents)).numpy(), 20, (0, 1))[0]
    expected = latents.size / 20
    shares, noise = counts / expected, 2 * math.sqrt(0.95 / expected)
    chart = Chart(
        (0, 1),
        (0, max(1.5, shares.max(), 1 + noise)),
        xlabel="probability",
        ylabel="relative frequency",
        width=WIDE,
        height=240,
    )
    chart.bar((0, 1), (1 - noise, 1 + noise), "band")
    edges = np.linspace(0, 1, 21)
    for i, share in enumerate(shares):
        chart.bar((edges[i] + 0.004, edges[i + 1] - 0.004), (0, share), "fill-data")
    chart.line([0, 1], [1, 1], "guide")
    return chart.svg("probability-integral transforms")


def _coverage(r: Report) -> str:
    levels = np.linspace(0, 1, 51)
    percent = [(v, f"{v:.0%}") for v in (0, 0.25, 0.5, 0.75, 1)]
    size: Any = {"width": WIDE, "height": 240, "margins": (52, 8, 14, 36)}
    chart = Chart(
        (0, 1), (0, 1), xlabel="probability of the region", ylabel="rows in it", xticks=percent, yticks=percent, **size
    )
    chart.line([0, 1], [0, 1], "guide")
    for regions, kind in ((r.central, "other"), (r.densest, "data")):
        if len(regions):
            held = np.searchsorted(np.sort(regions), levels, side="right") / len(regions)
            chart.line(levels.tolist(), held.tolist(), kind)
    return chart.svg("coverage of regions")


def _histogram(rows: np.ndarray, draws: np.ndarray, step: float = 0.0, **size: Any) -> str:
    low, high = np.quantile(np.concatenate([rows, rows, draws]), [0.005, 0.995])
    bins = int(np.clip(2 * len(rows) ** 0.4, 8, 36))
    if step:
        first, last = round(low / step), round(high / step)
        width = max(1, math.ceil((last - first + 1) / 40))
        edges = (np.arange(first, last + width + 1, width) - 0.5) * step
    else:
        edges = np.linspace(*_opened(low, high), bins + 1)
    heights = [np.histogram(part, edges)[0] / len(part) for part in (rows, draws)]
    chart = Chart(
        (edges[0], edges[-1]),
        (0, max(1e-9, *(h.max() for h in heights)) * 1.05),
        yticks=[],
        **{"height": 160, "margins": (10, 6, 10, 22), **size},
    )
    for a, b, share in zip(edges, edges[1:], heights[0], strict=False):
        chart.bar((a, b), (0, share), "fill-data")
    chart.steps(edges, heights[1], "model")
    return chart.svg("histogram")


def _marginal(column: Column, look: Look) -> str:
    if column.kind == "number":
        return _histogram(look.rows, look.draws, column.step)
    shares = {v: [float((part == v).mean()) for part in (look.rows, look.draws)] for v in column.values}
    often = sorted(shares, key=lambda v: -shares[v][0])
    shown = [(str(v), shares[v]) for v in often[:7]]
    if rest := often[7:]:
        shown.append((f"{len(rest)} others", [sum(shares[v][i] for v in rest) for i in (0, 1)]))
    top = max(1e-9, *(s for _, pair in shown for s in pair))
    chart = Chart((0, top), (len(shown) - 0.5, -0.5), height=160, margins=(92, 0, 40, 2), yticks=[], xticks=[])
    for i, (name, (rows, draws)) in enumerate(shown):
        half = min(0.36, 0.08 * len(shown))
        chart.bar((0, rows), (i - half, i), "fill-data")
        chart.bar((0, draws), (i, i + half), "fill-model")
        chart.text(84, chart.y(i) + 4, _short(name, 14), "end", "name")
        chart.text(chart.x(max(rows, draws)) + 6, chart.y(i) + 4, f"{rows:.0%}")
    return chart.svg("shares of categories")


def _scatter(a: Column, b: Column, r: Report, rng: np.random.Generator) -> str:
    parts = []
    axes = [_axis(a, r, 3, 128), _axis(b, r, 8)]
    for table, kind, (left, right) in ((r.table, "data", (52, 140)), (r.draws, "model", (190, 2))):
        chart = Chart(
            *(span for span, _ in axes),
            margins=(left, 6, right, 36),
            xlabel=_short(a.name, 20),
            xticks=axes[0][1],
            yticks=[(v, text * (kind == "data")) for v, text in axes[1][1]],
        )
        places = rng.permutation(len(table[a.name]))[:DOTS]
        xs, ys = (_place(c, table[c.name][places], rng) for c in (a, b))
        chart.dots(xs.tolist(), ys.tolist(), kind)
        parts.append(chart)
    parts[0].parts += parts[1].parts
    return parts[0].svg(f"{a.name} and {b.name}")


def _axis(
    column: Column, r: Report, most: int, width: float | None = None
) -> tuple[tuple[float, float], list[tuple[float, str]]]:
    """The range of an axis, and its ticks; those of a horizontal one must fit in its width."""
    if column.kind == "category":
        every = math.ceil(len(column.values) / most)
        named = [(float(i), _short(str(v), 7)) for i, v in enumerate(column.values)]
        return (-0.5, len(named) - 0.5), named[::every]
    low, high = _opened(*np.quantile(r.table[column.name], [0.005, 0.995]))
    room = 0.03 * (high - low) + column.step / 2
    low, high = low - room, high + room
    return (low, high), ticks(low, high) if width is None else fitting(low, high, width)


def _place(column: Column, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Values as places on an axis; equal ones a little apart."""
    spread = rng.uniform(-0.3, 0.3, len(values))
    if column.kind == "number":
        return values + spread * column.step
    places = {value: i for i, value in enumerate(column.values)}
    return np.array([places.get(v, -9) for v in values.tolist()]) + spread


def _short(text: str, most: int) -> str:
    """
    >>> _short("a long name", 7)
    'a long…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"
