"""The density of a table's rows: `TableFlow`, and `fit_table`, which goes from a table to one."""

from __future__ import annotations

import copy
import math
import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from quarflow import models
from quarflow.bases import Ordered
from quarflow.checks import check_choice, check_count, check_tensor
from quarflow.evaluation import as_data, as_tensor, rows_at_once
from quarflow.flow import Flow
from quarflow.logdet import drawing
from quarflow.solvers import unchecked
from quarflow.tables import EDGE, MISSING, Rows, Schema, Table, as_list, as_table, fingerprints, some
from quarflow.training import History, TrainingDiverged, fit, split_rows
from quarflow.transforms.base import Chain, Transform
from quarflow.transforms.elementwise import Asinh, Quantiles, Support
from quarflow.transforms.mixing import Whiten

if TYPE_CHECKING:
    from quarflow.bases import Ordered


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

    def forward(self, codes: Tensor, context: Tensor, here: Tensor | None = None) -> Tensor:
        """(n, m) integers and context (n, features) -> (n,); of those that are ``here`` (n, m), the first ones."""
        terms = self.terms(codes, context)
        return (terms if here is None else torch.where(here, terms, 0)).sum(1)

    def terms(self, codes: Tensor, context: Tensor) -> Tensor:
        """``log P(c_j | c_<j, context)``: (n, m)."""
        log_p = [context.new_zeros(len(codes), 0)]
        known = context
        for j, size in enumerate(self.sizes):
            log_p.append(self._log_p(j, known).gather(1, codes[:, j : j + 1]))
            known = torch.cat([known, _one_hot(codes[:, j], size, known)], 1)
        return torch.cat(log_p, 1)

    def sample(
        self, context: Tensor, generator: torch.Generator | None = None, first: Tensor | None = None
    ) -> Tensor:
        """One draw for each row of ``context``: (n, m); given the ``first`` ones (n, k) where there are any."""
        known, codes = context, []
        for j, size in enumerate(self.sizes):
            if first is not None and j < first.shape[1]:
                codes.append(first[:, j])
            else:
                codes.append(torch.multinomial(self._log_p(j, known).exp(), 1, generator=generator)[:, 0])
            known = torch.cat([known, _one_hot(codes[j], size, known)], 1)
        return torch.stack(codes, 1) if codes else context.new_zeros(len(context), 0).long()

    @torch.no_grad()
    def initialise(self, codes: Tensor) -> None:
        """Biases from frequencies, with one more row of each category; networks that start at zero.

        Negative codes are missing.
        """
        for j, size in enumerate(self.sizes):
            counts = torch.bincount(codes[codes[:, j] >= 0, j], minlength=size) + 1
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
    Whole numbers, and numbers that repeat, get uniform noise in training. Otherwise the density of a row is the mean
    over ``points`` places in the cell of its steps, the same for every row, a Latin hypercube: an estimate of the mean
    over the cell, which is the probability of whole numbers, and one that is the same at every call.

    The labels come first in the order of the model, ``schema.order``. If the numbers keep theirs (`in_one_order`),
    the density of any first columns, or of later ones given these, is exact as well.

    Args:
        schema: what the columns are.
        flow: of as many features as the schema has numbers; its context is that of the schema, and all labels one-hot.
        hidden: units of the networks of the labels.
        points: places in a cell.
        knots: of `Quantiles`, which make each column normal before the flow; 0 for none.
        missing: ``"marginal"`` if NaN marks what is missing in a row of ``x``, the last columns of the order.
    """

    widths: Tensor
    phases: Tensor
    shifts: Tensor
    middle: Tensor
    log_units: Tensor

    def __init__(
        self, schema: Schema, flow: Flow, hidden: int = 32, points: int = 8, knots: int = 0, missing: str = "error"
    ) -> None:
        check_choice("missing", missing, MISSING)
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
        self.gaps = missing == "marginal"
        if self.gaps:
            self._check_ordered("missing='marginal'")
        self.log_unit = sum(math.log(c.scale) for c in columns)
        log_units = torch.tensor([math.log(c.scale) for c in columns], dtype=torch.float64)
        self.register_buffer("log_units", log_units, persistent=False)
        # What stands for a number that is missing.
        places = {"line": 0.0, "positive": 1.0, "negative": -1.0, "unit": 0.5}
        middle = torch.tensor([places[c.support] for c in columns])
        widths = torch.tensor([(c.step or c.width) / c.scale for c in columns], dtype=torch.float64)
        # Whole numbers are multiples of their width in v, or lie half a step from an edge.
        phases = torch.tensor([0.5 * (c.support != "line") for c in columns])
        if not bool((widths > 0).any()):
            points = 1
        generator = torch.Generator().manual_seed(0)
        strata = [(torch.randperm(points, generator=generator) + 0.5) / points - 0.5 for _ in columns]
        shifts = torch.stack(strata, 1) if columns else torch.zeros(points, 0)
        for name, value in (("widths", widths), ("phases", phases), ("shifts", shifts), ("middle", middle)):
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
        """Not as a whole: labels come first, and steps of numbers are averaged over; see `in_one_order`."""
        return False

    @property
    def in_one_order(self) -> bool:
        """Whether the numbers keep one order from end to end: no number depends on a later one."""
        return super().triangular

    def _check_triangular(self) -> None:
        raise ValueError(
            "flow: expected one of tensors; a TableFlow has labels and steps beside its numbers. Take score(table, "
            "columns=..., given=...) for the density of some columns, and draw(n, given=...)."
        )

    def _check_ordered(self, option: str) -> None:
        if not self.in_one_order:
            raise ValueError(
                f"{option}: expected a model whose numbers keep one order from end to end; this one mixes them. Fit "
                "with first=[...] (quarflow fit --first), the columns to have first, and a model that can keep an "
                "order: quar, maf, iaf or bnaf, with mixing=None."
            )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self._log_p(x, context, self.gaps)

    def _log_p(self, x: Tensor, context: Tensor | None, gaps: bool) -> Tensor:
        """``log p`` of what is there in each row: with ``gaps``, NaN marks what is missing."""
        here = ~x.isnan() if gaps else None
        numbers, codes, known = self._parts(x.nan_to_num() if gaps else x, context)
        count = numbers.shape[1]
        log_p = self.labels(codes, self._label_context(len(x), context), None if here is None else here[:, count:])
        here = None if here is None else here[:, :count]
        if self.training:
            return log_p + self._numbers_log_p(self._noisy(numbers), known, here)
        points = len(self.shifts)
        here = None if here is None else here.repeat(points, 1)
        density = self._numbers_log_p(*self._cells(numbers, known), here)
        return log_p + density.view(points, len(x)).logsumexp(0) - math.log(points)

    def _numbers_log_p(self, v: Tensor, known: Tensor | None, here: Tensor | None) -> Tensor:
        """The log-density of numbers at ``v``, in units of the table; of those alone that are ``here``."""
        if here is None:
            return super().forward(v, known) - self.log_unit
        v = torch.where(here, v, self.middle)
        if not self.in_one_order:  # all are there, or none
            return torch.where(here.all(1), super().forward(v, known) - self.log_unit, 0)
        z, slopes = self.transform.log_slopes(v, known)
        terms = cast("Ordered", self.base).log_terms(z) + slopes - self.log_units.to(v.dtype)
        return torch.where(here, terms, 0).sum(1)

    def _cells(self, numbers: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Numbers at each place in their cells, (points n, numbers), and what is known of them."""
        points = len(self.shifts)
        cells = (numbers + (self.shifts * self.widths)[:, None]).flatten(0, 1)
        return cells, None if known is None else known.repeat(points, 1)

    def terms(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p`` of each number, then of each label, given those before it: (n, numbers + labels).

        Labels come before numbers, see ``schema.order``. The terms add up to `log_prob`. The flow of the numbers has to
        be in one order, as ``models.table(schema, mixing=None)`` is.

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
        terms = cast("Ordered", self.base).log_terms(z) + slopes
        # The density of the numbers up to each, at every place, and over the cell.
        prefixes = terms.view(len(self.shifts), *numbers.shape).cumsum(2).logsumexp(0) - math.log(len(self.shifts))
        units = prefixes.new_tensor([math.log(c.scale) for c in self.schema.numbers])
        terms = prefixes.diff(dim=1, prepend=prefixes.new_zeros(len(x), 1)) - units
        return torch.cat([terms, self.labels.terms(codes, self._label_context(len(x), context))], 1)

    def latents(self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The noise that rows stand for, (n, numbers): independent normals, if this is the density of the rows.

        Whole numbers are taken at a random place of their step, as in training.
        """
        numbers, _, known = self._parts(x, context)
        z, _ = self.transform(self._noisy(numbers, generator), known)
        return cast("Ordered", self.base).normal_scores(z)

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
        self._check_varying(self._whole(x))
        free = torch.cat([self.widths == 0, self.widths.new_zeros(len(self.schema.labels), dtype=torch.bool)])
        return torch.where(free, x, torch.arange(len(x)).to(x)[:, None])

    def initialise(self, x: Tensor, context: Tensor | None = None) -> Flow:
        check_tensor("x", x, tuple(self.event_shape), self.base.anchor, self.gaps)
        context = self._context_rows(context, x.shape[:1])
        self.labels.initialise(x[:, len(self.schema.numbers) :].nan_to_num(-1).long())
        whole = self._whole(x)
        self._check_varying(whole)
        context = None if context is None else context[~x.isnan().any(1)]
        numbers, _, known = self._parts(whole, context)
        self.transform.initialise(self._noisy(numbers), known)
        return self

    def _whole(self, x: Tensor) -> Tensor:
        """The rows that lack nothing."""
        if not self.gaps:
            return x
        whole = x[~x.isnan().any(1)]
        if len(whole) < 2:
            raise ValueError(
                f"missing: expected 2 rows or more to start from in which nothing is missing; got {len(whole)} of "
                f"{len(x)}. Leave out the columns that few rows have."
            )
        return whole

    def _check_varying(self, x: Tensor) -> None:
        for i, column in enumerate(self.schema.numbers):
            if not column.step and bool((x[:, i] == x[0, i]).all()):
                raise ValueError(
                    f"column {column.name!r}: expected numbers that vary; got one value in each of {len(x)} rows drawn "
                    f"to learn from, and few others in the table. Leave it out, columns={{{column.name!r}: 'drop'}}, "
                    "declare it 'category', or give the step of its values."
                )

    def diagnose(self, x: Tensor, context: Tensor | None = None) -> str:
        lacking = x.isnan()
        numbers, _, known = self._parts(torch.where(lacking, 0, x), context)
        return super().diagnose(torch.where(lacking[:, : numbers.shape[1]], self.middle, numbers), known)

    def _draw(
        self, n: int, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        x = self._sample(n, context, generator)
        with drawing(self, generator):
            return x, self(x, self._context_rows(context, (n,)))

    def _sample(
        self, n: int, context: Tensor | None, generator: torch.Generator | None, first: Tensor | None = None, k: int = 0
    ) -> Tensor:
        """``n`` rows, given the ``k`` first columns of the order, which are in ``first``."""
        check_count("n", n)
        context = self._context_rows(context, (n,))
        count, labels = len(self.schema.numbers), len(self.schema.labels)
        given = None if first is None else first[:, count : count + min(k, labels)].long()
        codes = self.labels.sample(self._label_context(n, context), generator, given)
        empty = self.base.anchor.new_zeros(n, count)
        _, _, known = self._parts(torch.cat([empty, codes.to(empty)], 1), context)
        with unchecked(), drawing(self, generator):
            if first is not None and k > labels:
                v = self._numbers_given(first[:, :count], k - labels, known, generator)
            else:
                v, _ = self.transform.inverse(self.base.sample(n, generator), known)
        if not bool(torch.isfinite(v).all()):
            raise FloatingPointError(f"sample gave NaN or inf: {super().diagnose(v, known)}")
        # Rounding can put a value on the edge itself, where there is no density.
        unit = torch.tensor([c.support == "unit" for c in self.schema.numbers], dtype=torch.bool, device=v.device)
        v = torch.where(unit, v.clamp(EDGE, 1 - EDGE), v)
        grid = torch.tensor([c.step > 0 for c in self.schema.numbers], dtype=torch.bool, device=v.device)
        steps = torch.where(grid, self.widths, 1)
        v = torch.where(grid, (torch.round(v / steps - self.phases) + self.phases) * steps, v)
        return torch.cat([v, codes.to(v)], 1)

    def _numbers_given(
        self, v: Tensor, k: int, known: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Numbers whose first ``k`` are those of ``v``; the others are draws given these."""
        here = torch.arange(v.shape[1], device=v.device) < k
        v = torch.where(here, v, self.middle)
        if bool((self.widths[:k] > 0).any()):
            # Given a step, the rest is a mixture over the places in the cell, by their density.
            parts = []
            for i in range(0, len(v), size := max(1, rows_at_once(v) // len(self.shifts))):
                cells, c = self._cells(v[i : i + size], None if known is None else known[i : i + size])
                log_p = self._numbers_log_p(cells, c, here.expand_as(cells)).view(len(self.shifts), -1)
                place = torch.multinomial(log_p.softmax(0).mT, 1, generator=generator)[:, 0]
                parts.append(v[i : i + size] + self.shifts[place] * self.widths)
            v = torch.where(here, torch.cat(parts), v)
        return self._complete(v, here[None], known, generator)

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

    def score(
        self,
        table: object,
        first_row: int = 0,
        *,
        columns: Iterable[str] | None = None,
        given: Iterable[str] = (),
    ) -> np.ndarray:
        """``log p`` of each row of a table in nats, float64; minus infinity where the schema allows no such row.

        With ``columns``, ``log p(columns | given)``, exact: those ``given``, and then the ``columns``, have to come
        first in ``schema.order``, and the table need not have the others. Without, of all that are not ``given``.

        >>> table = {"size": [1.5, 2.25, 4.0, 2.5], "colour": ["red", "blue", "red", "red"]}
        >>> flow = models.table(Schema.of(as_table(table)), blocks=1, hidden=(4,)).eval()
        >>> flow.score(table).shape
        (4,)
        >>> flow.score({"colour": ["red", "blue"]}, columns=["colour"]).shape
        (2,)
        """
        order, always = self.schema.order, [c.name for c in self.schema.given]
        given = [name for name in as_list(given) if name not in always]
        columns = [name for name in order if name not in given] if columns is None else as_list(columns)
        before, end = self._first("given", given), self._first("columns", [*given, *columns])
        if before == end:
            raise ValueError(f"columns: expected one or more that are not given; got {some(columns)}.")
        partial = end < len(order)
        rows = self.schema.encode(as_table(table), first_row, self.gaps, end if partial else None)
        nats = self.score_rows(rows.x, rows.context, self.gaps or partial)
        if before:
            labels, numbers = len(self.schema.labels), len(self.schema.numbers)
            later = np.r_[labels : labels + numbers, :labels] >= before  # places of the columns of x
            known = nats > -math.inf  # what is impossible stays so
            nats[known] -= self.score_rows(np.where(later, math.nan, rows.x), rows.context, gaps=True)[known]
        nats[~rows.possible] = -math.inf
        return nats

    def _first(self, option: str, names: Sequence[str]) -> int:
        """How many ``names`` there are, if they are the first columns of the order, and have a density of their own."""
        order, k = self.schema.order, len(set(names))
        if set(names) != set(order[:k]):
            raise ValueError(
                f"{option}: expected the first columns of the model's order, {some(order)}; got {some(names)}. To have "
                "others first, fit with first=[...] (quarflow fit --first)."
            )
        if len(self.schema.labels) < k < len(order):
            self._check_ordered(option)
        return k

    def score_rows(
        self, x: np.ndarray, context: np.ndarray | None = None, gaps: bool | None = None
    ) -> np.ndarray:
        """``log p`` of encoded rows, in batches: (n,), float64. Estimates (models.residual) draw the same each time.

        With ``gaps`` NaN marks what is missing; None: as the flow was made.
        """
        gaps = self.gaps if gaps is None else gaps
        rows, given = as_data(self, x, context, gaps=gaps)
        size = max(1, rows_at_once(rows) // len(self.shifts))
        training = self.training
        self.eval()
        try:
            noise = None if self.transform.exact else torch.Generator(rows.device).manual_seed(0)
            parts = []
            with torch.no_grad(), drawing(self, noise):
                for i in range(0, len(rows), size):
                    part, known = rows[i : i + size], None if given is None else given[i : i + size]
                    parts.append(self._log_p(part, known, gaps))
                    self._check_density(parts[-1], part, known)
        finally:
            self.train(training)
        return torch.cat(parts).double().cpu().numpy()

    def draw(self, n: int, given: object = None, generator: torch.Generator | None = None) -> Table:
        """``n`` rows; ``given`` is a table of the context, of one row for all or ``n`` rows.

        It may have columns that are modelled too, the first of ``schema.order``: then the others are draws given these.

        >>> table = as_table({"size": [1.5, 2.25, 4.0, 2.5], "year": [1, 1, 2, 2]})
        >>> flow = models.table(Schema.of(table, context=["year"]), blocks=1, hidden=(4,)).eval()
        >>> flow.draw(2, given={"year": [1]})["year"]
        array([1., 1.])
        """
        check_count("n", n)
        schema, like = self.schema, self.base.anchor
        table = {} if given is None else as_table(given)
        if schema.given and not table:
            given = some(c.name for c in schema.given)
            raise ValueError(f"given: expected a table with the columns of the context, {given}; got none.")
        names = [c.name for c in schema.columns]
        if unknown := [name for name in table if name not in names]:
            raise ValueError(f"given: expected columns of {some(names)}; got {some(unknown)}.")
        k = self._first("given", [name for name in schema.order if name in table])
        if k == len(schema.order):
            raise ValueError("given: expected a column that is left to draw; got all.")
        context, first = None, None
        if table:
            rows = len(next(iter(table.values())))
            if rows not in (1, n):
                raise ValueError(f"given: expected 1 row, or {n}, one for each draw; got {rows}.")
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                try:
                    found = schema.encode(table, first=k)
                except UserWarning as warning:  # of values with probability zero
                    raise ValueError(f"given: {warning}") from None
            table = {name: np.repeat(values, n // rows) for name, values in table.items()}
            first = as_tensor("given", np.repeat(found.x, n // rows, axis=0)).to(like)
            context = None if found.context is None else as_tensor("context", found.context).to(like)
        with torch.no_grad():
            x = self._sample(n, context, generator, first, k)
        return schema.decode(x.double().cpu().numpy(), table)


VALIDATED = 20  # rows from which on some of them are held out for early stopping
FEW = 1000  # rows below which a flow is a small one


def defaults(rows: int, columns: int) -> dict[str, Any]:
    """Options of `models.table`, of `models.quar` and of `fit` for a table of so many rows and columns.

    >>> found = defaults(rows=150, columns=4)
    >>> found["table"], found["model"]["blocks"], found["fit"]["validation"]
    ({'knots': 8}, 2, 0.2)
    """
    shared = {"block": "conditioned", "base": "joint-student", "mixing": "lu"}
    model: dict[str, Any] = shared | {"blocks": 4, "hidden": (16, 16), "conditioner": (64, 64)}
    fit: dict[str, Any] = {"max_steps": round(min(4000, 20 * rows**0.5)), "validation": 0.1, "patience": 20}
    fit |= {"learning_rate": 1e-2, "weight_decay": 0.3}
    if rows >= FEW:
        return {"table": {"knots": min(256, rows // 8)}, "model": model, "fit": fit}
    # A flow that starts near the Gaussian of normal scores, and is drawn back to it.
    model = shared | {"blocks": 2, "hidden": (8,), "conditioner": (32,), "start": 0.01}
    fit |= {"max_steps": max(60, min(600, 2 * rows)), "validation": 0.2 if rows >= VALIDATED else 0.0}
    fit |= {"evaluate_every": 10, "patience": 15, "weight_decay": 5.0}
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
    first: Iterable[str] | None = None,
    missing: str = "error",
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
    schema = Schema.of(known, columns, context, bounds, tails, first, missing)
    rows = schema.encode(known, gaps=missing == "marginal")
    order = _order(rows, weights)
    given = None if rows.context is None else rows.context[order]
    found = defaults(len(order), len(schema.numbers))
    chosen = found["table"] | (found["model"] if model == "quar" else {})
    fresh = partial(_fresh, schema, model, seed=seed, ordered=first is not None, missing=missing)
    flow, history = fresh(chosen, dict(model_options or {})), None
    limits: dict[str, Any] = {"max_seconds": max_seconds}
    # A limit on time alone takes the place of that on steps, unless rows are few: more steps do not help there.
    if max_steps is not None or (max_seconds is not None and len(order) >= FEW):
        limits["max_steps"] = max_steps
    options = {**found["fit"], **limits, **fit_options}
    if not isinstance(options["validation"], numbers.Real):
        held_out = schema.encode(as_table(options["validation"]), gaps=flow.gaps)
        if not held_out.possible.all():
            raise ValueError(
                f"validation: expected rows that the table to learn from allows; got {(~held_out.possible).sum()} with "
                "categories that it does not have, or values outside the bounds. Declare wider bounds, or drop them."
            )
        options["validation"] = held_out.x, held_out.context
    weights = None if weights is None else weights[order]
    learn = partial(fit, x=rows.x[order], context=given, weights=weights, seed=seed)
    long = options["max_steps"] is None or options["max_steps"] >= 5 * PILOT
    if len(order) >= FEW and long and schema.numbers and options["validation"] and "knots" not in (model_options or {}):
        # Normal columns are a good start where values repeat or lie in clusters, a Gaussian where columns add up.
        began = time.monotonic()
        other = fresh(chosen | {"knots": 0}, dict(model_options or {}))
        flow, history = _better((flow, other), learn, options)
        if max_seconds is not None:
            options["max_seconds"] = max(0.01, max_seconds - (time.monotonic() - began))
    if history is None:
        history = learn(flow, **options)
    # Scores in float64 do not depend on which rows are scored together.
    flow.double()
    flow.notes = {"history": history.to_dict(), **_identity(rows), "seed": seed}
    flow.notes["held_out"] = part if isinstance(part := options["validation"], float | int) else 0.0
    return flow, history


PILOT = 100  # steps, for each start that is tried


def _better(
    flows: Sequence[TableFlow], learn: Callable[..., History], options: dict[str, Any]
) -> tuple[TableFlow, History | None]:
    """The flow that a short run brings furthest on the validation rows, as it was; or learnt so far, if interrupted."""
    # As many steps for each, whatever else happens on the machine.
    seconds = None if options["max_seconds"] is None else 0.15 * options["max_seconds"]
    limits = {"max_steps": PILOT, "max_seconds": seconds, "evaluate_every": PILOT, "patience": None, "progress": False}
    best, most = flows[0], -math.inf
    for flow in flows:
        pilot = copy.deepcopy(flow)
        try:
            history = learn(pilot, **options | limits)
        except TrainingDiverged:
            continue
        if history.stopped == "interrupted":
            return pilot, history
        limits["max_steps"] = max([1, *history.steps[-1:]])
        if history.best_validation is not None and history.best_validation > most:
            best, most = flow, history.best_validation
    return best, None


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


def _fresh(
    schema: Schema,
    model: Any,
    found: dict[str, Any],
    options: dict[str, Any],
    seed: int,
    ordered: bool = False,
    missing: str = "error",
) -> TableFlow:
    """The flow of a schema, with weights from ``seed``; with its columns in one order if that is asked for."""
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
    # What is said of the mixing stays; that may be an error, then.
    free = "mixing" not in options and not isinstance(model, Flow)
    if (ordered or missing == "marginal") and free and hasattr(models.REGISTRY.get(kind), "mixing"):
        config["mixing"] = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = models.table(schema, kind, missing=missing, **config)
    if ordered:
        flow._check_ordered("first")
    return flow
