"""`FlowDensity`: a flow as an estimator of scikit-learn, for tables as they are."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quarflow.checkpoint import load, save
from quarflow.checks import check_count
from quarflow.flow import Flow
from quarflow.table_flow import counted, fit_table
from quarflow.tables import Table, as_table

try:
    from sklearn.base import BaseEstimator, OutlierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("FlowDensity needs scikit-learn: pip install 'quarflow[sklearn]'") from error

class FlowDensity(OutlierMixin, BaseEstimator):
    """The density of the rows of a table, by a flow; of some columns given others, with ``context``.

    A table is a DataFrame, of pandas or polars, or an array. Text and truth values are categories, whole numbers are
    integers, whatever their dtype; `quarflow.tables` says what becomes of each kind of column. Densities are in the
    units of the table: per unit of each number, probabilities of whole numbers and categories.

    Args:
        model: the flow of the numbers: a name in `quarflow.models`, such as ``"quar"`` or ``"maf"``, a function that
            makes a flow from ``(features, context, **model_options)``, or a flow made by one, as a pattern: a new one
            like it is trained.
        model_options: of the model. Where nothing is said, they follow from the rows and columns of the table.
        context: names of columns that are given, not modelled (or their numbers, if the table is an array).
        columns: what columns are, where they are not what they seem: by name, ``"number"`` (continuous),
            ``"integer"``, the step of rounded values, ``"category"`` or ``"drop"``.
        bounds: by column, ``(low, high)``, with None for a side without; or ``"found"``, for a column or for all.
        tails: whether columns are taken to have heavy tails: True, False, or ``"auto"`` to find out.
        first: columns (names or numbers) that come first in a model whose columns keep one order: then there are the
            density of the first ones, and densities and draws of the others given them. None: no one order, which
            usually fits better.
        missing: ``"error"``, or ``"marginal"`` for rows that may lack values: the columns then keep one order, those
            with the fewest gaps first, and what is missing behind the others is integrated out.
        contamination: the part of the training rows that `predict` calls outliers, in (0, 0.5].
        max_steps, max_seconds: of the training; None for what follows from the number of rows.
        fit_options: more options of `quarflow.fit`, such as ``{"learning_rate": 3e-3}``.
        random_state: of the starting weights, the training and the draws.
        verbose: show a bar while training.

    Attributes:
        flow_: the `quarflow.table_flow.TableFlow`, in float64, which ``quarflow.save(model.flow_, path)`` writes.
        schema_: what the columns are.
        history_: of the training.
        offset_: `predict` calls a row an outlier if `score_samples` is below it.

    Rows count by ``sample_weight``: a weight of 2 is the same as the row twice, and no order of rows changes the
    result.

    >>> x = np.random.default_rng(0).normal(size=(100, 2))
    >>> model = FlowDensity(random_state=0, max_steps=20).fit(x)
    >>> model.score_samples(x[:3]).shape, model.sample(5).shape, model.predict([[0.0, 0.0], [9.0, 9.0]])
    ((3,), (5, 2), array([ 1, -1]))
    """

    def __init__(
        self,
        model: str | Callable[..., Flow] | Flow = "quar",
        *,
        model_options: Mapping[str, Any] | None = None,
        context: Sequence[str | int] | None = None,
        columns: Mapping[Any, object] | None = None,
        bounds: Mapping[Any, object] | str | None = None,
        tails: bool | str = "auto",
        first: Sequence[str | int] | None = None,
        missing: str = "error",
        contamination: float = 0.1,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        fit_options: Mapping[str, Any] | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.model_options = model_options
        self.context = context
        self.columns = columns
        self.bounds = bounds
        self.tails = tails
        self.first = first
        self.missing = missing
        self.contamination = contamination
        self.max_steps = max_steps
        self.max_seconds = max_seconds
        self.fit_options = fit_options
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> FlowDensity:
        """Learns the density of the rows of ``X``; ``y`` is ignored."""
        if not (isinstance(self.contamination, float | int) and 0 < self.contamination <= 0.5):
            raise ValueError(f"contamination: expected a number in (0, 0.5]; got {self.contamination!r}.")
        table = self._table(X, reset=True)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not weights.any():
                raise ValueError("sample_weight: expected a weight above zero; got all sample weights zero.")
        table, weights = counted(table, weights)
        names = list(table)
        self.flow_, self.history_ = fit_table(
            table,
            model=self.model,
            model_options=self.model_options,
            context=self._list(self.context, names, "context"),
            columns=self._named(self.columns, names, "columns"),
            bounds=self.bounds if isinstance(self.bounds, str) else self._named(self.bounds, names, "bounds"),
            tails=self.tails,
            first=None if self.first is None else self._list(self.first, names, "first"),
            missing=self.missing,
            weights=weights,
            max_steps=self.max_steps,
            max_seconds=self.max_seconds,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            progress=self.verbose,
            **(self.fit_options or {}),
        )
        self.schema_ = self.flow_.schema
        scores = self.flow_.score(table)
        # Half way between the last row with no more than this part of the weight at or below it, and the next: not a
        # score itself, which another batch may round to the other side.
        order = np.argsort(scores)
        below = np.cumsum(np.ones(len(scores)) if weights is None else weights[order])
        place = np.searchsorted(below, self.contamination * below[-1] * (1 + 1e-9), side="right")
        self.offset_ = float(scores[order[[max(place - 1, 0), place]]].mean())
        return self

    def score_samples(
        self, X: Any, *, columns: Sequence[str | int] | None = None, given: Sequence[str | int] = ()
    ) -> np.ndarray:
        """``log p`` of each row in nats, (n,); minus infinity, with a warning, where the schema allows no such row.

        With ``columns``, ``log p(columns | given)``: those ``given``, and then the ``columns``, have to be the first in
        ``schema_.order``; see ``first``.
        """
        check_is_fitted(self)
        names = [c.name for c in self.schema_.columns]
        return self.flow_.score(
            self._table(X, reset=False),
            columns=None if columns is None else self._list(columns, names, "columns"),
            given=self._list(given, names, "given"),
        )

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The mean of `score_samples`."""
        return float(np.average(self.score_samples(X), weights=sample_weight))

    def decision_function(self, X: Any) -> np.ndarray:
        """`score_samples` minus ``offset_``: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """1 for inliers, -1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def sample(self, n_samples: int = 1, context: Any = None, random_state: Any = None) -> Any:
        """``n_samples`` rows with the columns of the table of `fit`: a DataFrame, of the same library, if that was one,
        else an array.

        Args:
            context: a table with the columns that are given, of one row for all or ``n_samples`` rows; with ``first``,
                it may have first columns of ``schema_.order`` too.
            random_state: in place of that of the estimator.
        """
        check_is_fitted(self)
        check_count("n_samples", n_samples)
        given = None
        if isinstance(context, Mapping):
            context = self._named(context, [c.name for c in self.schema_.columns], "context")
        if context is not None:
            given = as_table(context, None if hasattr(context, "columns") else [c.name for c in self.schema_.given])
        state = check_random_state(self.random_state if random_state is None else random_state)
        generator = torch.Generator().manual_seed(int(state.randint(2**31 - 1)))
        table = self.flow_.draw(n_samples, given, generator)
        for column in self.schema_.columns:
            if column.name not in table:
                table[column.name] = np.full(n_samples, np.nan)  # dropped by choice: nothing is known of it
        table = {column.name: table[column.name] for column in self.schema_.columns}
        if hasattr(self, "feature_names_in_"):
            # Lists: a column of objects is one of text or truth values, whatever the library.
            return importlib.import_module(self._library).DataFrame({k: v.tolist() for k, v in table.items()})
        return np.stack(list(table.values()), axis=1)

    def _table(self, X: Any, reset: bool) -> Table:
        if hasattr(X, "columns"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if reset:
                self._library = "polars" if type(X).__module__.startswith("polars") else "pandas"
            if len(X) == 0 or len(X.columns) == 0:
                raise ValueError(f"X: expected rows and columns; got a table of shape {X.shape}.")
            return as_table(X)
        X = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
        return as_table(X, None if reset else [c.name for c in self.schema_.columns])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "marginal"
        return tags

    def _list(self, columns: str | int | Sequence[str | int] | None, names: list[str], option: str) -> list[str]:
        columns = [columns] if isinstance(columns, str | int) else columns or ()
        return list(self._named(dict.fromkeys(columns), names, option))

    def _named(self, options: Mapping[Any, object] | None, names: list[str], option: str) -> dict[str, Any]:
        """By the names of columns what is given by their names or numbers."""
        named = {}
        for key, value in (options or {}).items():
            if isinstance(key, int) and not -len(names) <= key < len(names):
                raise ValueError(f"{option}: expected the number of a column, below {len(names)}; got {key}.")
            named[names[key] if isinstance(key, int) else key] = value
        return named

    # A pickle holds the flow as the safe file of `quarflow.save`.

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "flow_" in state:
            with tempfile.TemporaryDirectory() as folder:
                save(state["flow_"], Path(folder) / "m.qf")
                state["flow_"] = (Path(folder) / "m.qf").read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "flow_" in state:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "m.qf").write_bytes(state["flow_"])
                state["flow_"] = load(Path(folder) / "m.qf")
        super().__setstate__(state)
