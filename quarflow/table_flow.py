"""The density of a table's rows: `TableFlow`, and `fit_table`, which goes from a table to one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from quarflow import models
from quarflow.bases import Independent
from quarflow.checks import check_count, check_tensor
from quarflow.evaluation import as_data, as_tensor, rows_at_once
from quarflow.flow import Flow
from quarflow.logdet import drawing
from quarflow.solvers import unchecked
from quarflow.tables import EDGE, Rows, Schema, Table, as_table, fingerprints, some
from quarflow.training import History, fit, split_rows
from quarflow.transforms.base import Chain, Transform
from quarflow.transforms.elementwise import Asinh, Quantiles, Support
from quarflow.transforms.mixing import Whiten


class Labels(nn.Module):
    """``log P(c_1, ..., c_m | context) = sum_j log P(c_j | c_<j, context)``, each a softmax of a small network.

    >>> labels = Labels([2, 3], context=0)
    >>> c = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    >>> labels(c, c.new_zeros(6, 0).float()).logsumexp(0).abs() < 1e-6
    tensor(True)
    """

    def __init__(self, sizes: Sequence[int], context: int, hidden: int = 32) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.biases = nn.ParameterList([torch.zeros(k) for k in sizes])
        self.nets = nn.ModuleList()
        for j, size in enumerate(sizes):
            known = context + sum(sizes[:j])
            layers = [nn.Linear(known, hidden), nn.SiLU(), nn.Linear(hidden, size)] if known else []
            self.nets.append(nn.Sequential(*layers))

    def forward(self, codes: Tensor, context: Tensor) -> Tensor:
        """(n, m) integers and context (n, features) -> (n,)."""
        return self.terms(codes, context).sum(1)

    def terms(self, codes: Tensor, context: Tensor) -> Tensor:
        """``log P(c_j | c_<j, context)``: (n, m)."""
        log_p = [context.new_zeros(len(codes), 0)]
        known = context
        for j, size in enumerate(self.sizes):
            log_p.append(self._log_p(j, known).gather(1, codes[:, j : j + 1]))
            known = torch.cat([known, _one_hot(codes[:, j], size, known)], 1)
        return torch.cat(log_p, 1)

    def sample(self, context: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One draw for each row of ``context``: (n, m)."""
        known, codes = context, []
        for j, size in enumerate(self.sizes):
            codes.append(torch.multinomial(self._log_p(j, known).exp(), 1, generator=generator)[:, 0])
            known = torch.cat([known, _one_hot(codes[j], size, known)], 1)
        return torch.stack(codes, 1) if codes else context.new_zeros(len(context), 0).long()

    @torch.no_grad()
    def initialise(self, codes: Tensor) -> None:
        """Biases from frequencies, with one more row of each category; networks that start at zero."""
        for j, size in enumerate(self.sizes):
            counts = torch.bincount(codes[:, j], minlength=size) + 1
            self.biases[j].copy_((counts / counts.sum()).log())
            for p in self.nets[j][-1].parameters() if len(self.nets[j]) else ():  # type: ignore[arg-type, index]
                p.zero_()

    def _log_p(self, j: int, known: Tensor) -> Tensor:
        logits = self.biases[j].expand(len(known), -1)
        if len(self.nets[j]):  # type: ignore[arg-type]
            logits = logits + self.nets[j](known)
        return logits.log_softmax(1)


def _one_hot(codes: Tensor, size: int, like: Tensor) -> Tensor:
    # Unlike torch's, without a look at the values, for which a device would have to be waited for.
    return (codes[:, None] == torch.arange(size, device=codes.device)).to(like)


class TableFlow(Flow):
    """``log p(row | context) = log P(labels | context) + log p(numbers | labels, context)``, in the table's units.

    Its ``x`` are encoded rows, (n, numbers + labels), from ``schema.encode``; `score` and `draw` take and give tables.
    Whole numbers get uniform noise in training. Otherwise the density of a row is the mean over ``points`` places in
    the cell of its steps, the same for every row, a Latin hypercube: an estimate of the mean over the cell, which is
    the probability of whole numbers, and one that is the same at every call.

    Args:
        schema: what the columns are.
        flow: of as many features as the schema has numbers; its context is that of the schema, and all labels one-hot.
        hidden: units of the networks of the labels.
        points: places in a cell.
        knots: of `Quantiles`, which make each column normal before the flow; 0 for none.
    """

    widths: Tensor
    phases: Tensor
    shifts: Tensor

    def __init__(self, schema: Schema, flow: Flow, hidden: int = 32, points: int = 8, knots: int = 0) -> None:
        columns, sizes = schema.numbers, [len(c.values) for c in schema.labels]
        check_count("hidden", hidden)
        check_count("points", points)
        if flow.event_shape != (len(columns),) or flow.context_features != schema.context_features + sum(sizes):
            raise ValueError(
                f"flow: expected {len(columns)} features and {schema.context_features + sum(sizes)} of context; got "
                f"{tuple(flow.event_shape)} and {flow.context_features}."
            )
        warp = [Support([c.support for c in columns]), Asinh([c.heavy for c in columns])]
        # Training starts near the Gaussian of the table: a first fit of few rows does not have to learn its covariance.
        gaussian: list[Transform] = [Whiten(len(columns))] if columns else []
        if columns and knots:
            gaussian = [Quantiles(len(columns), knots), *gaussian]
        super().__init__(Chain([*warp, *gaussian, flow.transform]), flow.base, schema.context_features)
        self.schema = schema
        self.labels = Labels(sizes, schema.context_features, hidden)
        self.log_unit = sum(math.log(c.scale) for c in columns)
        widths = torch.tensor([c.step / c.scale for c in columns], dtype=torch.float64)
        # Whole numbers are multiples of their width in v, or lie half a step from an edge.
        phases = torch.tensor([0.5 * (c.support != "line") for c in columns])
        if not bool((widths > 0).any()):
            points = 1
        generator = torch.Generator().manual_seed(0)
        places = [(torch.randperm(points, generator=generator) + 0.5) / points - 0.5 for _ in columns]
        shifts = torch.stack(places, 1) if columns else torch.zeros(points, 0)
        for name, value in (("widths", widths), ("phases", phases), ("shifts", shifts)):
            self.register_buffer(name, value.to(torch.get_default_dtype()), persistent=False)

    @property
    def exact(self) -> bool:
        """Whether ``log_prob`` is exact; not with whole numbers, whose cells take a quadrature."""
        return self.transform.exact and len(self.shifts) == 1

    @property
    def event_shape(self) -> torch.Size:
        """(numbers + labels,)."""
        return torch.Size((len(self.schema.numbers) + len(self.schema.labels),))

    @property
    def triangular(self) -> bool:
        """Not as a whole: labels come first, and steps of numbers are averaged over."""
        return False

    def _check_triangular(self) -> None:
        raise ValueError(
            "flow: expected one of tensors; a TableFlow has labels and steps beside its numbers. Fit a table with the "
            "columns that are given as context."
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        numbers, codes, known = self._parts(x, context)
        log_p = self.labels(codes, self._label_context(len(x), context)) - self.log_unit
        if self.training:
            return log_p + super().forward(self._noisy(numbers), known)
        points = len(self.shifts)
        density = super().forward(*self._cells(numbers, known))
        return log_p + density.view(points, len(x)).logsumexp(0) - math.log(points)

    def _cells(self, numbers: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Numbers at each place in their cells, (points n, numbers), and what is known of them."""
        points = len(self.shifts)
        cells = (numbers + (self.shifts * self.widths)[:, None]).flatten(0, 1)
        return cells, None if known is None else known.repeat(points, 1)

    def terms(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p`` of each number, then of each label, given those before it: (n, numbers + labels).

        Labels come before numbers, both in the order of the table. The terms add up to `log_prob`. The flow of the
        numbers has to be in one order, as ``models.table(schema, mixing=None)`` is.

        >>> schema = Schema.of(as_table({"size": [1.5, 2.25, 4.0], "count": [1, 2, 4], "on": [True, False, True]}))
        >>> flow = models.table(schema, blocks=2, hidden=(4,), mixing=None).eval()
        >>> x = torch.tensor([[0.5, -1.0, 1.0]])
        >>> bool(torch.allclose(flow.terms(x).sum(1), flow.log_prob(x), atol=1e-5))
        True
        """
        if not self.in_one_order:
            super()._check_triangular()
        numbers, codes, known = self._parts(x, context)
        z, slopes = self.transform.log_slopes(*self._cells(numbers, known))
        terms = cast("Independent", self.base).log_terms(z) + slopes
        # The density of the numbers up to each, at every place, and over the cell.
        prefixes = terms.view(len(self.shifts), *numbers.shape).cumsum(2).logsumexp(0) - math.log(len(self.shifts))
        units = prefixes.new_tensor([math.log(c.scale) for c in self.schema.numbers])
        terms = prefixes.diff(dim=1, prepend=prefixes.new_zeros(len(x), 1)) - units
        return torch.cat([terms, self.labels.terms(codes, self._label_context(len(x), context))], 1)

    @property
    def in_one_order(self) -> bool:
        """Whether `terms` are to be had: no number depends on a later one."""
        return isinstance(self.base, Independent) and self.transform.triangular

    def latents(self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The noise that rows stand for, (n, numbers): independent normals, if this is the density of the rows.

        Whole numbers are taken at a random place of their step, as in training.
        """
        numbers, _, known = self._parts(x, context)
        z, _ = self.transform(self._noisy(numbers, generator), known)
        return cast("Independent", self.base).normal_scores(z)

    def on_the_line(
        self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The numbers as what is learnt gets them, its log-derivative in the units of the table, and what is known.

        Each number at all places of its cell, (points n, numbers), or at a random one, (n, numbers), of ``generator``.
        """
        numbers, _, known = self._parts(x, context)
        cells, known = self._cells(numbers, known) if generator is None else (self._noisy(numbers, generator), known)
        u, ladj = Chain(self._steps[:2])(cells)  # the bounds, the tails
        return u, ladj - self.log_unit, known

    def varying(self, x: Tensor) -> Tensor:
        """``x`` with other numbers where a column may be constant: in labels and whole numbers. Others are named."""
        self._check_varying(x)
        free = torch.cat([self.widths == 0, self.widths.new_zeros(len(self.schema.labels), dtype=torch.bool)])
        return torch.where(free, x, torch.arange(len(x)).to(x)[:, None])

    def initialise(self, x: Tensor, context: Tensor | None = None) -> Flow:
        check_tensor("x", x, tuple(self.event_shape), self.base.anchor)
        self._check_varying(x)
        numbers, codes, known = self._parts(x, self._context_rows(context, x.shape[:1]))
        self.labels.initialise(codes)
        self.transform.initialise(self._noisy(numbers), known)
        return self

    def _check_varying(self, x: Tensor) -> None:
        for i, column in enumerate(self.schema.numbers):
            if not column.step and bool((x[:, i] == x[0, i]).all()):
                raise ValueError(
                    f"column {column.name!r}: expected numbers that vary; got one value in each of {len(x)} rows drawn "
                    f"to learn from, and few others in the table. Leave it out, columns={{{column.name!r}: 'drop'}}, "
                    "declare it 'category', or give the step of its values."
                )

    def diagnose(self, x: Tensor, context: Tensor | None = None) -> str:
        numbers, _, known = self._parts(x, context)
        return super().diagnose(numbers, known)

    def _draw(
        self, n: int, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        check_count("n", n)
        context = self._context_rows(context, (n,))
        codes = self.labels.sample(self._label_context(n, context), generator)
        z = self.base.sample(n, generator)
        _, _, known = self._parts(torch.cat([z, codes.to(z)], 1), context)
        with unchecked(), drawing(self, generator):
            v, _ = self.transform.inverse(z, known)
        if not bool(torch.isfinite(v).all()):
            raise FloatingPointError(f"sample gave NaN or inf: {super().diagnose(v, known)}")
        # Rounding can put a value on the edge itself, where there is no density.
        unit = torch.tensor([c.support == "unit" for c in self.schema.numbers], dtype=torch.bool, device=v.device)
        v = torch.where(unit, v.clamp(EDGE, 1 - EDGE), v)
        steps = torch.where(self.widths > 0, self.widths, 1)
        v = torch.where(self.widths > 0, (torch.round(v / steps - self.phases) + self.phases) * steps, v)
        x = torch.cat([v, codes.to(v)], 1)
        with drawing(self, generator):
            return x, self(x, context)

    def _label_context(self, n: int, context: Tensor | None) -> Tensor:
        return self.base.anchor.new_zeros(n, 0) if context is None else context

    def _parts(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Numbers, labels, and the context of the numbers: the context and the labels one-hot, or None."""
        count = len(self.schema.numbers)
        numbers, codes = x[:, :count], x[:, count:].long()
        parts = [_one_hot(codes[:, j], len(c.values), x) for j, c in enumerate(self.schema.labels)]
        parts = [*([] if context is None else [context]), *parts]
        return numbers, codes, torch.cat(parts, 1) if parts else None

    def _noisy(self, numbers: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.rand(numbers.shape, generator=generator, dtype=numbers.dtype, device=numbers.device)
        # Never quite the edge of a cell, which may be that of a bound.
        return numbers + (noise - 0.5) * (1 - 2 * EDGE) * self.widths

    def score(self, table: object, first_row: int = 0) -> np.ndarray:
        """``log p`` of each row of a table in nats, float64; minus infinity where the schema allows no such row.

        >>> table = {"size": [1.5, 2.25, 4.0, 2.5], "colour": ["red", "blue", "red", "red"]}
        >>> flow = models.table(Schema.of(as_table(table)), blocks=1, hidden=(4,)).eval()
        >>> flow.score(table).shape
        (4,)
        """
        rows = self.schema.encode(as_table(table), first_row)
        nats = self.score_rows(rows.x, rows.context)
        nats[~rows.possible] = -math.inf
        return nats

    def score_rows(self, x: np.ndarray, context: np.ndarray | None = None) -> np.ndarray:
        """``log p`` of encoded rows, in batches: (n,), float64. Estimates (models.residual) draw the same each time."""
        rows, given = as_data(self, x, context)
        size = max(1, rows_at_once(rows) // len(self.shifts))
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                noise = None if self.transform.exact else torch.Generator(rows.device).manual_seed(0)
                parts = [
                    self.log_prob(rows[i : i + size], None if given is None else given[i : i + size], noise)
                    for i in range(0, len(rows), size)
                ]
        finally:
            self.train(training)
        return torch.cat(parts).double().cpu().numpy()

    def draw(self, n: int, given: object = None, generator: torch.Generator | None = None) -> Table:
        """``n`` rows; ``given`` is a table of the context, of one row for all or ``n`` rows.

        >>> table = as_table({"size": [1.5, 2.25, 4.0, 2.5], "year": [1, 1, 2, 2]})
        >>> flow = models.table(Schema.of(table, context=["year"]), blocks=1, hidden=(4,)).eval()
        >>> flow.draw(2, given={"year": [1]})["year"]
        array([1., 1.])
        """
        check_count("n", n)
        table, context = None, None
        if self.schema.given:
            if given is None:
                names = some(c.name for c in self.schema.given)
                raise ValueError(f"given: expected a table with the columns of the context, {names}; got none.")
            table = as_table(given)
            rows = len(next(iter(table.values()), ()))
            if rows not in (1, n):
                raise ValueError(f"given: expected 1 row, or {n}, one for each draw; got {rows}.")
            context = as_tensor("context", self.schema.encode_context(table)).to(self.base.anchor)
            table = {name: np.repeat(values, n // rows) for name, values in table.items()}
        x = self.sample(n, context, generator)
        return self.schema.decode(x.double().cpu().numpy(), table)


VALIDATED = 20  # rows from which on some of them are held out for early stopping
FEW = 1000  # rows below which a flow is a small one


def defaults(rows: int, columns: int) -> dict[str, Any]:
    """Options of `models.table`, of `models.quar` and of `fit` for a table of so many rows and columns.

    >>> found = defaults(rows=150, columns=4)
    >>> found["table"], found["model"]["blocks"], found["fit"]["validation"]
    ({'knots': 8}, 2, 0.2)
    """
    model: dict[str, Any] = {"block": "conditioned", "blocks": 4, "hidden": (16, 16), "conditioner": (64, 64)}
    fit: dict[str, Any] = {"max_steps": round(min(4000, 20 * rows**0.5)), "validation": 0.1, "patience": 20}
    fit["learning_rate"] = 5e-3
    if rows >= FEW:
        return {"table": {"knots": min(256, rows // 8)}, "model": model, "fit": fit}
    # A flow that starts near the Gaussian of normal scores, and is drawn back to it.
    model = {"block": "conditioned", "blocks": 2, "hidden": (8,), "conditioner": (32,), "mixing": "lu", "start": 0.01}
    fit |= {"max_steps": max(60, min(600, 2 * rows)), "validation": 0.2 if rows >= VALIDATED else 0.0}
    fit |= {"evaluate_every": 10, "patience": 15, "learning_rate": 1e-2, "weight_decay": 5.0}
    return {"table": {"knots": 8}, "model": model, "fit": fit}


def fit_table(
    table: object,
    *,
    model: str | Callable[..., Flow] | Flow = "quar",
    model_options: Mapping[str, Any] | None = None,
    context: Iterable[str] = (),
    columns: Mapping[str, object] | None = None,
    bounds: Mapping[str, object] | str | None = None,
    tails: bool | str = "auto",
    weights: np.ndarray | None = None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    **fit_options: Any,
) -> tuple[TableFlow, History]:
    """A density of the rows of a table; see `quarflow.estimator.FlowDensity` for the options.

    ``validation`` is a part of the rows, as for `quarflow.fit`, or a table of its own. Whole-number weights count as so
    many rows: the training is then the same to the last bit, in whatever order the rows are given.

    >>> table = {"size": [1.5, 2.25, 4.0, 2.5], "colour": ["red", "blue", "red", "red"]}
    >>> flow, history = fit_table(table, max_steps=5)
    >>> flow.score(table).shape
    (4,)
    """
    known, weights = counted(as_table(table), weights)
    schema = Schema.of(known, columns, context, bounds, tails)
    rows = schema.encode(known)
    order = _order(rows, weights)
    given = None if rows.context is None else rows.context[order]
    found = defaults(len(order), len(schema.numbers))
    chosen = found["table"] | (found["model"] if model == "quar" else {})
    flow = _fresh(schema, model, chosen, dict(model_options or {}), seed)
    limits: dict[str, Any] = {"max_seconds": max_seconds}
    # A limit on time alone takes the place of that on steps, unless rows are few: more steps do not help there.
    if max_steps is not None or (max_seconds is not None and len(order) >= FEW):
        limits["max_steps"] = max_steps
    options = {**found["fit"], **limits, **fit_options}
    if not isinstance(options["validation"], numbers.Real):
        held_out = schema.encode(as_table(options["validation"]))
        if not held_out.possible.all():
            raise ValueError(
                f"validation: expected rows that the table to learn from allows; got {(~held_out.possible).sum()} with "
                "categories that it does not have, or values outside the bounds. Declare wider bounds, or drop them."
            )
        options["validation"] = held_out.x, held_out.context
    weights = None if weights is None else weights[order]
    history = fit(flow, rows.x[order], given, weights=weights, seed=seed, **options)
    # Scores in float64 do not depend on which rows are scored together.
    flow.double()
    flow.notes = {"history": history.to_dict(), **_identity(rows), "seed": seed}
    flow.notes["held_out"] = part if isinstance(part := options["validation"], float | int) else 0.0
    return flow, history


def _order(rows: Rows, weights: np.ndarray | None = None) -> np.ndarray:
    """An order that does not depend on that of the rows given."""
    keys = [a for a in (rows.x, rows.context, None if weights is None else weights[:, None]) if a is not None]
    return np.lexsort(np.concatenate(keys, axis=1).T[::-1])


SKETCH = 1024  # fingerprints of rows that a model keeps


def _identity(rows: Rows) -> dict[str, Any]:
    """What rows can be recognised by, in whatever order they are: for the notes of a flow."""
    found = fingerprints(rows)
    return {"rows": len(found), "digest": int(found.sum()), "sketch": np.unique(found)[:SKETCH].tolist()}


def fitted_rows(flow: TableFlow, rows: Rows) -> tuple[np.ndarray, np.ndarray] | None:
    """The places of the rows that a flow of `fit_table` learnt from, and of those held out; None for another table."""
    found = _identity(rows)
    if any(flow.notes.get(key) != found[key] for key in ("rows", "digest")):
        return None
    train, held_out = split_rows(len(rows.x), flow.notes["held_out"], flow.notes["seed"])
    order = _order(rows)
    return order[train.numpy()], order[held_out.numpy()]


def known_part(flow: TableFlow, rows: Rows) -> float:
    """The part of rows that were in the table of `fit_table`, estimated from the fingerprints that were kept."""
    found, kept = fingerprints(rows), np.array(flow.notes.get("sketch", []), dtype=np.uint64)
    # A fingerprint is as good as a random number: those below the largest one kept are a random part of both tables.
    checked = found if len(kept) < SKETCH else found[found <= kept[-1]]
    return float(np.isin(checked, kept).mean()) if len(checked) else 0.0


def counted(table: Table, weights: np.ndarray | None) -> tuple[Table, np.ndarray | None]:
    """Rows that count, and their weights; repeated, without weights, where these are whole numbers.

    >>> counted({"a": np.array([1.5, 2.5, 3.5])}, np.array([2, 0, 1]))
    ({'a': array([1.5, 1.5, 3.5])}, None)
    """
    if weights is None:
        return table, None
    rows = np.arange(len(weights))
    if (weights == np.round(weights)).all() and weights.sum() <= max(10 * len(rows), 100_000):
        rows = rows.repeat(weights.astype(int))
        return {name: values[rows] for name, values in table.items()}, None
    rows = rows[weights > 0]
    return {name: values[rows] for name, values in table.items()}, weights[rows]


def _fresh(schema: Schema, model: Any, found: dict[str, Any], options: dict[str, Any], seed: int) -> TableFlow:
    """The flow of a schema, with weights from ``seed``."""
    knots = options.pop("knots", found["knots"])
    if isinstance(model, str):
        config = {"model": model, **found, **options, "knots": knots}
    else:
        pattern = model if isinstance(model, Flow) else model(features=2, context=0, **options)
        if pattern.config is None:
            raise ValueError("model: expected a flow of quarflow.models; got one that was put together by hand.")
        config = {k: v for k, v in pattern.config.to_dict().items() if k not in ("features", "context")}
        config["knots"] = knots
    kind = config.pop("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.table(schema, kind, **config)
