"""Tables as they are: a `Schema` says what each column is, and encodes rows for a `quarflow.table_flow.TableFlow`.

================  =====================================  ======================================================
column            what the model sees                    what it adds to ``log p(row)``, in the column's own unit
================  =====================================  ======================================================
numbers           ``v = (x - location) / scale``         the flow's log-density of ``v``, minus ``log scale``
with bounds       ``log v``, ``-log(-v)``, ``logit v``   the same, and the log-derivative of the map
with heavy tails  ``asinh v``                            the same, and the log-derivative of the map
whole numbers     ``v`` with uniform noise of one step   log of the mean density over the step around ``x``
numbers that      the same, with the width of a value    the same, per unit: the mean over the width around ``x``
repeat
categories        one-hot, as context of the numbers     ``log P(category | categories before it)``: exact
context           numbers and one-hot, as context        nothing: it is given
missing           nothing: the last ones of a row        nothing: integrated out, with ``missing="marginal"``
constant          nothing: dropped                       nothing: the density is that of the other columns
duplicate         nothing: dropped                       nothing: the same
================  =====================================  ======================================================

So ``log p(row) = log P(categories | context) + log p(numbers | categories, context)``, which sums and integrates to one
over all rows that the schema allows, up to the quadrature over steps. Categories, then numbers, are modelled in the
order of the table, or in the one that `Schema.of` is asked for: ``Schema.order``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from quarflow.checks import check_choice, check_positive
from quarflow.transforms.elementwise import SUPPORTS

# By column: float64 with NaN where a value is missing, or text and truth values as objects, with None.
Table = dict[str, np.ndarray]
KINDS = ("number", "category", "constant", "duplicate", "drop")
HEAVY = 10.0  # robust deviations from the median that make a column one with heavy tails
ATOM = 0.2  # of the rows with one value: more than a column of numbers should have
MISSING = ("error", "marginal")  # what becomes of rows with missing values
MANY = 20  # rows from which on values that repeat say something
EDGE = 1e-6  # of the scale: a value on the edge of its bounds counts as this far inside


def as_table(data: object, names: Sequence[str] | None = None) -> Table:
    """A DataFrame, a mapping from names to columns or a 2-d array as a `Table`.

    >>> as_table({"age": [31, None], "colour": ["red", "blue"]})
    {'age': array([31., nan]), 'colour': array(['red', 'blue'], dtype=object)}
    """
    if isinstance(data, Mapping):
        columns = {str(name): values for name, values in data.items()}
    elif hasattr(data, "columns"):
        columns = {str(name): data[name] for name in data.columns}  # type: ignore[index]
        if len(columns) != len(data.columns):
            raise ValueError(f"table: expected columns with different names; got {list(data.columns)}.")
    else:
        array = np.asarray(data)
        if array.ndim != 2:
            raise ValueError(f"table: expected rows and columns; got an array of shape {array.shape}.")
        columns = {name: array[:, i] for i, name in enumerate(names or [f"x{i}" for i in range(array.shape[1])])}
    table = {name: _values(name, values) for name, values in columns.items()}
    if len({len(values) for values in table.values()}) > 1:
        raise ValueError(f"table: expected columns of one length; got { {k: len(v) for k, v in table.items()} }.")
    return table


def _values(name: str, values: Any) -> np.ndarray:
    if hasattr(values, "isna"):  # pandas, where missing values have many forms
        missing, array = np.asarray(values.isna()), values.to_numpy(dtype=object)
        numeric = getattr(values.dtype, "kind", "O") in "iuf"
        array = np.where(missing, math.nan, array).astype(float) if numeric else np.where(missing, None, array)
    else:
        array = np.asarray(values) if hasattr(values, "__array__") else _array(list(values))
    if array.ndim != 1:
        raise ValueError(f"column {name!r}: expected one value for each row; got shape {array.shape}.")
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind not in "OUb":
        raise ValueError(f"column {name!r}: expected numbers, text or truth values; got {array.dtype}. Convert it.")
    found = array.tolist()
    kept = [None if v is None or v != v else v for v in found]
    present = [v for v in kept if v is not None]
    if all(isinstance(v, numbers.Real) and not isinstance(v, bool | np.bool_) for v in present) and present:
        return np.array([math.nan if v is None else float(v) for v in kept])
    for v in present:
        if not isinstance(v, str | bool | np.bool_ | numbers.Real):
            raise TypeError(f"column {name!r}: argument must be a string or a number; got {type(v).__name__}.")
    if len({isinstance(v, str) for v in present}) > 1:
        row = next(i for i, v in enumerate(kept) if v is not None and isinstance(v, str) != isinstance(kept[0], str))
        raise ValueError(
            f"column {name!r}: expected either text or numbers; got both, such as {kept[row]!r} in row {row}. "
            "Turn it into one of them."
        )
    out = np.empty(len(kept), dtype=object)
    out[:] = kept
    return out


@dataclass(frozen=True)
class Column:
    """What a column is; see the table at the head of `quarflow.tables`."""

    name: str
    kind: str  # one of KINDS
    given: bool = False  # a column of the context
    step: float = 0.0  # whole numbers have 1; 0 for continuous
    support: str = "line"  # of v
    heavy: bool = False
    location: float = 0.0
    scale: float = 1.0
    values: tuple[Any, ...] = ()  # the categories, or the constant
    source: str = ""  # what a duplicate is equal to
    place: int = 0  # categories, and numbers, are modelled in the order of their places, and then of the table
    width: float = 0.0  # of a value of numbers that repeat, off any grid; 0 if they do not

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("support", self.support, SUPPORTS)
        check_positive("scale", self.scale)
        types = {"name": str, "source": str, "given": bool, "heavy": bool, "place": int}
        for value, kind in ((getattr(self, field), kind) for field, kind in types.items()):
            if not isinstance(value, kind):
                raise ValueError(f"column {self.name!r}: expected {kind.__name__}; got {value!r}.")
        steps = self.step, self.width
        if not (all(isinstance(v, float) and 0 <= v < math.inf for v in steps) and math.isfinite(self.location)):
            raise ValueError(f"column {self.name!r}: expected finite numbers; got {steps!r}, {self.location!r}.")
        if self.kind in ("category", "constant") and not self.values:
            raise ValueError(f"column {self.name!r}: expected its values; got none.")
        if not all(isinstance(v, str | bool | int | float) for v in self.values):
            raise ValueError(f"column {self.name!r}: expected text, truth values or numbers; got {self.values!r:.200}.")

    @property
    def in_words(self) -> str:
        """
        >>> Column("age", "number", step=1.0, support="positive", location=-0.5).in_words
        'whole numbers from 0'
        """
        if self.kind != "number":
            words = {
                "category": f"{len(self.values)} categories" + ", given" * self.given,
                "constant": f"constant {', '.join(map(repr, self.values[:1]))}, dropped",
                "duplicate": f"a duplicate of {self.source!r}, dropped",
                "drop": "dropped",
            }
            return words[self.kind]
        steps = {0.0: "numbers", 1.0: "whole numbers"}.get(self.step, f"multiples of {self.step:g}")
        low, high = self.bounds
        bounds = f" from {low:g}" * (low > -math.inf) + f" to {high:g}" * (high < math.inf)
        repeat = f" that repeat, {self.width:.2g} wide" * (self.width > 0)
        return steps + repeat + bounds + " with heavy tails" * self.heavy + ", given" * self.given

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest value that the column can have."""
        half = self.step / 2
        low = self.location + half if self.support in ("positive", "unit") else -math.inf
        high = {"negative": self.location - half, "unit": self.location + self.scale - half}.get(self.support, math.inf)
        return low, high

    def outside(self, x: np.ndarray) -> np.ndarray:
        """Whether values are beyond the bounds; those of steps have half a step to spare, against rounding."""
        v = (x - self.location) / self.scale
        below = v < 0 if self.support in ("positive", "unit") else np.zeros(len(v), dtype=bool)
        return below | (v > {"negative": 0, "unit": 1}.get(self.support, math.inf))

    def standardise(self, x: np.ndarray) -> np.ndarray:
        """``v`` of values within the bounds; those on an edge count as a little inside."""
        v = ((np.round(x / self.step) * self.step if self.step else x) - self.location) / self.scale
        if self.support == "unit":
            return v.clip(EDGE, 1 - EDGE)
        return v if self.support == "line" else np.where(v == 0, EDGE if self.support == "positive" else -EDGE, v)

    def restore(self, v: np.ndarray) -> np.ndarray:
        """The inverse of `standardise`."""
        x = v * self.scale + self.location
        # A zero has no sign: files would show it.
        return (np.round(x / self.step) * self.step if self.step else x).clip(*self.bounds) + 0.0


class Rows(NamedTuple):
    """Encoded rows: ``x`` (n, features) and ``context`` (n, context features) as a `TableFlow` takes them, with NaN for
    what is missing, and where the schema gives a row no probability at all (``possible`` is false)."""

    x: np.ndarray
    context: np.ndarray | None
    possible: np.ndarray


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in their order.

    >>> schema = Schema.of(as_table({"size": [1.5, 2.25, 4.0, 2.5], "colour": ["red", "blue", "red", "red"]}))
    >>> print(schema)
    size: numbers
    colour: 2 categories
    >>> schema.encode(as_table({"size": [2.5], "colour": ["red"]})).x[:, 1]
    array([1.])
    """

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not self.numbers and not self.labels:
            raise ValueError("table: expected a column that varies, and is not given; got none.")
        names = {c.name for c in self.columns}
        if len(names) < len(self.columns) or not {c.source for c in self.columns} <= {*names, ""}:
            raise ValueError(f"schema: expected columns with different names; got {some(names)}.")

    @classmethod
    def of(
        cls,
        table: Table,
        kinds: Mapping[str, object] | None = None,
        context: Iterable[str] = (),
        bounds: Mapping[str, object] | str | None = None,
        tails: bool | str = "auto",
        first: Iterable[str] | None = None,
        missing: str = "error",
    ) -> Schema:
        """The schema that the rows of a table have, where it is not declared.

        Args:
            table: from `as_table`.
            kinds: by column, ``"number"`` (continuous), ``"integer"``, the step of its values, ``"category"`` or
                ``"drop"``. Otherwise text and truth values are categories, whole numbers are integers.
            context: names of the columns that are given.
            bounds: by column, ``(low, high)``, None for a side without; ``"found"``, for the column or for all: 0 and
                1 if all values lie there, else 0 if they all lie on one side of it.
            tails: whether columns get the ``asinh`` of heavy tails; ``"auto"``: where a value is more than 10 robust
                deviations from the median.
            first: columns that come first in `order`, in this order; categories before numbers.
            missing: ``"marginal"`` lets rows lack values: of the columns that are not ``first`` those with the fewest
                missing values then come next.
        """
        check_choice("missing", missing, MISSING)
        kinds, context = dict(kinds or {}), as_list(context)
        first = as_list(first or ())
        declared = dict.fromkeys(table, "found") if bounds == "found" else bounds or {}
        if not isinstance(declared, Mapping):
            raise ValueError(f"bounds: expected a mapping from columns to (low, high), or 'found'; got {bounds!r}.")
        check_choice("tails", tails, (True, False, "auto"))
        for option, names in (("columns", kinds), ("context", context), ("bounds", declared), ("first", first)):
            if unknown := [name for name in names if name not in table]:
                raise ValueError(f"{option}: expected columns of the table, {some(table)}; got {some(unknown)}.")
        if dropped := [name for name in context if kinds.get(name) == "drop"]:
            raise ValueError(f"context: expected columns that are not dropped; got {some(dropped)}.")
        if out := [name for name in first if name in context or kinds.get(name) == "drop"]:
            raise ValueError(f"first: expected columns that are modelled, not given or dropped; got {some(out)}.")
        rows = len(next(iter(table.values()), ()))
        if rows < 2:
            raise ValueError(f"table: expected 2 rows or more to learn from; got {rows} sample{'s' * (rows != 1)}.")
        kept = {name: values for name, values in table.items() if kinds.get(name) != "drop"}
        check_present(kept, gaps=[name for name in kept if missing == "marginal" and name not in context])
        # A column equal to one that is given is known, so the given ones come first.
        seen: dict[object, str] = {}
        found: dict[str, Column] = {}
        for name in [*context, *(name for name in kept if name not in context)]:
            values, given = kept[name], name in context
            column = _column(name, values, kinds.get(name), given, declared.get(name), tails)
            key = values.tobytes() if values.dtype.kind == "f" else tuple(values.tolist())
            if column.kind != "constant" and key in seen:
                column = Column(name, "duplicate", given, source=seen[key])
            seen.setdefault(key, name)
            found[name] = column
        for column in found.values():
            if column.kind in ("constant", "duplicate"):
                warnings.warn(
                    f"column {column.name!r}: {column.in_words}: the density is that of the other columns.",
                    stacklevel=3,
                )
        if first or missing == "marginal":
            gaps = {name: int(_missing(values).sum()) for name, values in kept.items()}
            order = sorted(found, key=lambda name: (first.index(name) if name in first else len(first), gaps[name]))
            found = {name: dataclasses.replace(column, place=order.index(name)) for name, column in found.items()}
        schema = cls(tuple(found.get(name, Column(name, "drop")) for name in table))
        asked = [name for name in first if name in schema.order]
        if asked != schema.order[: len(asked)]:
            raise ValueError(
                f"first: expected categories before numbers, and every category before the first number, "
                f"{some(c.name for c in schema.labels)}; got {some(first)}. Name the categories too, or have them as "
                "context, or drop them."
            )
        return schema

    @cached_property
    def numbers(self) -> list[Column]:
        """Columns that the flow models, in its order."""
        return sorted((c for c in self.columns if c.kind == "number" and not c.given), key=lambda c: c.place)

    @cached_property
    def labels(self) -> list[Column]:
        """Categories that are modelled, in their order."""
        return sorted((c for c in self.columns if c.kind == "category" and not c.given), key=lambda c: c.place)

    @property
    def order(self) -> list[str]:
        """Names of the columns that are modelled, in the order of the model: categories, then numbers."""
        return [c.name for c in [*self.labels, *self.numbers]]

    @cached_property
    def given(self) -> list[Column]:
        """Columns of the context."""
        return [c for c in self.columns if c.kind in ("number", "category") and c.given]

    @property
    def context_features(self) -> int:
        """Size of the context, with its categories one-hot."""
        return sum(len(c.values) if c.kind == "category" else 1 for c in self.given)

    def __str__(self) -> str:
        return "\n".join(f"{c.name}: {c.in_words}" for c in self.columns)

    def encode(self, table: Table, first_row: int = 0, gaps: bool = False, first: int | None = None) -> Rows:
        """Rows as a `TableFlow` takes them. Errors name column and row, counted from ``first_row``.

        A category that was not seen and a value outside the bounds have probability zero: they come with a warning.
        With ``gaps`` the last columns of the `order` may be missing in a row. With ``first`` no more than so many
        columns of the `order` are looked at: all others are missing.
        """
        used = [*self.numbers, *self.labels]
        known = set(self.order[:first])
        dropped = [c for c in self.columns if c.kind in ("constant", "duplicate")] if first is None else []
        self._check(table, [*self.given, *(c for c in used if c.name in known), *dropped], first_row, gaps)
        rows = len(next(iter(table.values())))
        x, possible = np.full((rows, len(used)), math.nan), np.ones(rows, dtype=bool)
        for i, column in enumerate(used):
            if column.name not in known:
                continue
            values = table[column.name]
            if column.kind == "category":
                x[:, i] = np.where(_missing(values), math.nan, _codes(column, values))
                wrong, what = x[:, i] < 0, "categories that were not in the training table"
                x[wrong, i] = 0
            elif values.dtype.kind != "f":
                continue  # nothing but missing values
            else:
                _check_steps(column, values, first_row)
                low, high = column.bounds
                wrong, what = column.outside(values), f"values outside {low:g} to {high:g}"
                x[:, i] = column.standardise(np.where(wrong, table_middle(column), values))
            if wrong.any():
                self._warn(column, what, wrong, first_row, "They have probability zero.")
                possible &= ~wrong
        if gaps:
            self._check_order(x, first_row)
        for column in dropped:
            same = table[column.source] if column.kind == "duplicate" else column.values[0]
            if (wrong := (table[column.name] != same) & ~_missing(table[column.name])).any():
                what = f"values that differ from what they were in training ({column.in_words})"
                self._warn(column, what, wrong, first_row, "They do not count.")
        return Rows(x, self.encode_context(table, first_row), possible)

    def encode_context(self, table: Table, first_row: int = 0) -> np.ndarray | None:
        """The context of rows, (n, context features), or None; an error for a category that was not seen."""
        if not self.given:
            return None
        self._check(table, self.given, first_row)
        parts = []
        for column in self.given:
            values = table[column.name]
            if column.kind == "number":
                v = column.standardise(values)
                parts.append((np.arcsinh(v) if column.heavy else v)[:, None])
                continue
            codes = _codes(column, values)
            if (codes < 0).any():
                row = int((codes < 0).argmax())
                raise ValueError(
                    f"column {column.name!r}, row {first_row + row}: expected one of the categories "
                    f"{some(column.values)}; got {values[row]!r}, which nothing is known about."
                )
            parts.append(np.eye(len(column.values))[codes])
        return np.concatenate(parts, axis=1)

    def decode(self, x: np.ndarray, given: Table | None = None) -> Table:
        """The table of rows that `encode` would turn into ``x``; columns that were dropped by choice are missing."""
        table = {c.name: given[c.name] for c in self.given} if given else {}
        for i, column in enumerate([*self.numbers, *self.labels]):
            if given and column.name in given:
                table[column.name] = given[column.name]
            elif column.kind == "number":
                table[column.name] = column.restore(x[:, i])
            else:
                table[column.name] = _array(column.values)[x[:, i].astype(int)]
        for column in self.columns:
            if column.kind == "constant":
                table[column.name] = np.repeat(_array(column.values), len(x))
        for column in self.columns:
            if column.kind == "duplicate" and column.source in table:
                table[column.name] = table[column.source]
        return {c.name: table[c.name] for c in self.columns if c.name in table}

    def to_json(self) -> str:
        """Text for `from_json`."""
        return json.dumps([dataclasses.asdict(column) for column in self.columns])

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema that gave ``text``."""
        try:
            return cls(tuple(Column(**(c | {"values": tuple(c["values"])})) for c in json.loads(text)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"schema: expected the text of Schema.to_json; {error!r}.") from error

    def _check_order(self, x: np.ndarray, first_row: int) -> None:
        """Behind a missing value everything must be missing, in the order of the model."""
        names, count = self.order, len(self.numbers)
        here = ~np.isnan(np.concatenate([x[:, count:], x[:, :count]], axis=1))
        wrong = ~here & np.maximum.accumulate(here[:, ::-1], axis=1)[:, ::-1]
        if not wrong.any():
            return
        found = [
            f"{name!r} ({int(w.sum())} of {len(w)} rows, first in row {first_row + int(w.argmax())})"
            for name, w in zip(names, wrong.T, strict=True)
            if w.any()
        ]
        raise ValueError(
            f"table: expected that behind a missing value all are missing, in the order of the model, {some(names)}; "
            f"got values behind missing {', '.join(found[:10])}{' and more' * (len(found) > 10)}. Fill or drop these "
            "rows, drop the columns, or fit with others first; categories, which come before numbers, can have a value "
            "for what is missing."
        )

    def _check(self, table: Table, columns: list[Column], first_row: int, gaps: bool = False) -> None:
        if absent := [c.name for c in columns if c.name not in table]:
            raise ValueError(f"table: expected the columns {some(absent)} too; got {some(table)}.")
        rows = len(next(iter(table.values()), ()))
        if rows == 0:
            raise ValueError("table: expected at least one row; got none.")
        lacking = [c.name for c in columns if gaps and not c.given]
        check_present({c.name: table[c.name] for c in columns}, first_row, lacking)
        for column in columns:
            values, text = table[column.name], column.kind == "category"
            if _missing(values).all():
                continue
            if column.kind == "number" and values.dtype.kind != "f":
                raise ValueError(
                    f"column {column.name!r}, row {first_row}: expected numbers, as in training; got {values[0]!r}."
                )
            if text and isinstance(column.values[0], str) and values.dtype.kind == "f":
                raise ValueError(
                    f"column {column.name!r}, row {first_row}: expected text, as in training; got {values[0]!r}."
                )

    def _warn(self, column: Column, what: str, wrong: np.ndarray, first_row: int, then: str) -> None:
        first = first_row + int(wrong.argmax())
        warnings.warn(
            f"column {column.name!r}: {what} in {int(wrong.sum())} of {len(wrong)} rows, first in row {first}. {then}",
            stacklevel=4,
        )


def fingerprints(rows: Rows) -> np.ndarray:
    """A number of 64 bits for each row, (n,): equal for equal rows, and for others hardly ever.

    >>> x = np.array([[1.5, 0.0], [2.5, 1.0], [1.5, -0.0]])
    >>> a, b, c = fingerprints(Rows(x, None, np.ones(3, dtype=bool)))
    >>> a == c, a == b
    (np.True_, np.False_)
    """
    parts = [rows.x] if rows.context is None else [rows.x, rows.context]
    found = np.zeros(len(rows.x), dtype=np.uint64)
    for column in np.concatenate(parts, axis=1).T:
        found ^= np.ascontiguousarray(column + 0.0).view(np.uint64)
        # The mixing of splitmix64: every bit comes to matter for every other.
        for factor, shift in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
            found *= np.uint64(factor)
            found ^= found >> np.uint64(shift)
    return found


def _missing(values: np.ndarray) -> np.ndarray:
    return np.isnan(values) if values.dtype.kind == "f" else np.array([v is None for v in values], dtype=bool)


def check_present(table: Table, first_row: int = 0, gaps: Iterable[str] = ()) -> None:
    """No infinite values, and no missing ones but in ``gaps``; the error names columns, counts and the first row.

    >>> check_present(as_table({"age": [31, None], "size": [1.5, 2.0]}))
    Traceback (most recent call last):
    ValueError: table: expected no missing values (NaN) and no inf; got 'age' (1 of 2 rows, first in row 1). ...
    """
    bad = {}
    for name, values in table.items():
        lacks = np.zeros(len(values), dtype=bool) if name in gaps else _missing(values)
        wrong = lacks | np.isinf(values) if values.dtype.kind == "f" else lacks
        if wrong.any():
            first = first_row + int(wrong.argmax())
            bad[name] = f"{name!r} ({int(wrong.sum())} of {len(values)} rows, first in row {first})"
    if bad:
        raise ValueError(
            f"table: expected no missing values (NaN) and no inf; got {', '.join(list(bad.values())[:10])}"
            f"{' and more' * (len(bad) > 10)}. Fill or drop these rows, drop the column, or, for missing values, fit "
            "with missing='marginal' (--missing marginal)."
        )


def table_middle(column: Column) -> float:
    """A value that a column of numbers can have."""
    low, high = column.bounds
    return {"positive": low + column.scale, "negative": high - column.scale, "unit": low}.get(
        column.support, column.location
    )


def _column(name: str, values: np.ndarray, kind: object, given: bool, bounds: object, tails: bool | str) -> Column:
    """What a column is, from its values and what was declared of it."""
    step = float(kind) if isinstance(kind, numbers.Real) and not isinstance(kind, bool) else 0.0
    if kind is not None and not step > 0:
        check_choice(f"columns: {name!r}", kind, ("number", "integer", "category", "drop", "a step > 0"))
    full, values = values, values[~_missing(values)]
    if len(values) == 0:
        raise ValueError(f"column {name!r}: expected values; all {len(full)} are missing. Leave it out: 'drop'.")
    numeric = values.dtype.kind == "f"
    distinct = np.unique(values) if numeric else _array(sorted(set(values.tolist()), key=lambda v: (str(type(v)), v)))
    if len(distinct) == 1:
        return Column(name, "constant", given, values=(_plain(distinct[0]),))
    if kind == "category" or not numeric:
        if kind in ("number", "integer") or step:
            raise ValueError(f"columns: {name!r} is declared {kind!r}; got no numbers, such as {values[0]!r}.")
        if bounds is not None and bounds != "found":
            raise ValueError(f"bounds: {name!r} holds categories; expected a column of numbers.")
        if kind is None and len(distinct) > max(20, len(values) // 2):
            raise ValueError(
                f"column {name!r}: expected categories; got {len(distinct)} different values in {len(values)} rows. "
                f"Leave the column out with columns={{{name!r}: 'drop'}}, or declare it 'category'."
            )
        return Column(name, "category", given, values=tuple(map(_plain, distinct)))
    if not step:
        whole = bool(np.all(distinct == np.round(distinct)))
        step = float(kind == "integer" or (kind is None and whole))
    if given:
        step = 0.0  # what is given needs no density
    low, high = (-math.inf, math.inf) if given else _bounds(name, bounds, values)
    middle, spread = _spread(values)
    middle = float(np.round(middle / step) * step) if step else middle
    edges = {(True, False): "positive", (False, True): "negative", (True, True): "unit"}
    support = edges.get((low > -math.inf, high < math.inf), "line")
    if support != "line":
        if (values < low).any() or (values > high).any():
            row = int(((full < low) | (full > high)).argmax())
            raise ValueError(f"bounds: expected {name!r} within {low:g} to {high:g}; got {full[row]:g} in row {row}.")
        for edge in (low, high):
            if step and math.isfinite(edge) and abs(edge / step - round(edge / step)) > 1e-3:
                raise ValueError(f"bounds: expected a multiple of {step:g}, the step of {name!r}; got {edge:g}.")
        middle = high + step / 2 if support == "negative" else low - step / 2
        spread = high - low + step if support == "unit" else max(spread, float(np.median(np.abs(values - middle))))
    heavy = support == "line" and (
        tails is True or (tails == "auto" and float(np.abs(distinct[[0, -1]] - middle).max()) > HEAVY * spread)
    )
    width, most = 0.0, int(np.unique(values, return_counts=True)[1].max())
    often = most >= ATOM * len(values) and len(values) >= MANY
    repeat = often or 2 * len(distinct) < len(values) >= MANY
    if kind is None and repeat and support == "line" and not (step or given):
        # Of a density at a point what repeats would have ever more. The gaps between values are what they are rounded
        # to; a value in many rows is as wide as the bars of a histogram of them (Freedman & Diaconis 1981).
        bar = 2 * 1.349 * spread * len(values) ** (-1 / 3)
        width = max(float(np.quantile(np.diff(distinct), 0.1)), bar * often)
    column = Column(name, "number", given, step, support, heavy, float(middle), float(spread), width=width)
    _check_steps(column, full, 0)
    if often and not (step or given or width):
        warnings.warn(
            f"column {name!r}: one value is in {most} of {len(values)} rows, where numbers have no density: it will "
            "grow without limit there. Give the step of the values, declare the column a category, or leave it out.",
            stacklevel=4,
        )
    return column


def _bounds(name: str, declared: object, values: np.ndarray) -> tuple[float, float]:
    if declared is None:
        return -math.inf, math.inf
    if declared == "found":
        if values.min() >= 0:
            return 0.0, 1.0 if values.max() <= 1 else math.inf
        return -math.inf, 0.0 if values.max() <= 0 else math.inf
    try:
        edges: list[Any] = list(declared)  # type: ignore[call-overload]
        low, high = (sign * math.inf if v is None else float(v) for sign, v in zip((-1, 1), edges, strict=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds: expected (low, high) for {name!r}, or 'found'; got {declared!r}.") from error
    if not low < high:
        raise ValueError(f"bounds: expected low < high for {name!r}; got {declared!r}.")
    return low, high


def _spread(values: np.ndarray) -> tuple[float, float]:
    """Median, and deviation by the quartiles, or else the standard deviation: both blind to the order of rows."""
    ordered = np.sort(values)
    first, middle, third = np.quantile(ordered, [0.25, 0.5, 0.75])
    return float(middle), float((third - first) / 1.349 or ordered.std() or 1.0)


def _check_steps(column: Column, values: np.ndarray, first_row: int) -> None:
    if not column.step:
        return
    steps = values / column.step
    # Numbers that were float32 have seven digits.
    wrong = np.abs(steps - np.round(steps)) > np.clip(1e-6 * np.abs(steps), 1e-3, 1e-2)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"column {column.name!r}, row {first_row + row}: expected {column.in_words}; got {values[row]!r}. "
            f"Round it, or fit with columns={{{column.name!r}: 'number'}}."
        )


def _codes(column: Column, values: np.ndarray) -> np.ndarray:
    places = {value: i for i, value in enumerate(column.values)}
    return np.fromiter((places.get(value, -1) for value in values.tolist()), dtype=np.int64, count=len(values))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _array(values: Sequence[Any]) -> np.ndarray:
    """Floats as such, anything else as objects."""
    if values and all(isinstance(v, float) for v in values):
        return np.array(values)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def as_list(names: Iterable[str]) -> list[str]:
    """Names, or a single one, each once."""
    return [names] if isinstance(names, str) else list(dict.fromkeys(names))


def some(names: Iterable[object]) -> str:
    """The first ten, for a message."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:10]) + f" and {len(shown) - 10} more" * (len(shown) > 10)
