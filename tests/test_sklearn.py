"""`FlowDensity` is an estimator of scikit-learn, by scikit-learn's own checks and by what they leave out."""

import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import quarflow as qf
from quarflow.estimator import FlowDensity

QUICK = {"max_steps": 25, "model_options": {"blocks": 1, "hidden": (4,)}, "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)) @ np.array([[2.0, 0.0], [1.0, 0.5]]) + 3


def test_every_check_of_scikit_learn_passes():
    # In a process of its own: scipy reads SCIPY_ARRAY_API, without which one check is skipped, when it is imported.
    code = """
from quarflow import FlowDensity
from sklearn.utils.estimator_checks import check_estimator
found = check_estimator(FlowDensity(), on_fail=None, on_skip=None)
print(len(found), "checks")
bad = [check for check in found if check["status"] != "passed"]
assert not bad, bad
"""
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 40


def test_importing_quarflow_does_not_import_scikit_learn():
    code = "import sys, quarflow; sys.exit(any(m in sys.modules for m in ('sklearn', 'pandas', 'pyarrow', 'numpy.ma')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert qf.FlowDensity is FlowDensity
    with pytest.raises(AttributeError, match="no attribute 'FlowDensities'"):
        qf.FlowDensities  # noqa: B018


def test_without_scikit_learn(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("sklearn")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "quarflow.estimator")
    with pytest.raises(ImportError, match=r"pip install 'quarflow\[sklearn\]'"):
        qf.FlowDensity  # noqa: B018


def test_nats_are_on_the_original_scale():
    model = FlowDensity(random_state=0, max_steps=60, model_options={"blocks": 1, "hidden": (4,)}).fit(X)
    scaled = FlowDensity(random_state=0, max_steps=60, model_options={"blocks": 1, "hidden": (4,)}).fit(1000 * X)
    difference = model.score_samples(X) - scaled.score_samples(1000 * X)
    assert difference == pytest.approx(2 * math.log(1000), abs=1e-2)
    assert model.score(X) == pytest.approx(model.score_samples(X).mean())
    # The density integrates to one over the plane.
    axes = np.linspace(-12, 18, 401), np.linspace(-6, 12, 401)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    density = np.exp(model.score_samples(grid.reshape(-1, 2)))
    assert density.sum() * np.prod([a[1] - a[0] for a in axes]) == pytest.approx(1, abs=2e-3)


def test_the_same_seed_gives_the_same_model():
    a, b = (FlowDensity(**QUICK).fit(X) for _ in range(2))
    assert (a.score_samples(X) == b.score_samples(X)).all()
    assert (a.sample(5) == b.sample(5)).all()
    assert (a.sample(5, random_state=1) != a.sample(5)).any()
    other = FlowDensity(**QUICK | {"random_state": 1}).fit(X)
    assert (other.score_samples(X) != a.score_samples(X)).any()


def test_weights_count_rows():
    weights = RNG.integers(0, 3, len(X))
    weighted = FlowDensity(**QUICK).fit(X, sample_weight=weights)
    repeated = FlowDensity(**QUICK).fit(RNG.permutation(X.repeat(weights, axis=0)))
    assert (weighted.score_samples(X) == repeated.score_samples(X)).all()
    assert weighted.offset_ == repeated.offset_
    # Fractions count in proportion: all the weight on the left half moves the density there.
    left = FlowDensity(**QUICK).fit(X, sample_weight=np.where(X[:, 0] < 3, 0.99, 0.01))
    assert left.sample(200)[:, 0].mean() < FlowDensity(**QUICK).fit(X).sample(200)[:, 0].mean() - 0.5
    assert np.average(left.predict(X) == -1, weights=np.where(X[:, 0] < 3, 0.99, 0.01)) == pytest.approx(0.1, abs=0.06)


def test_outliers():
    model = FlowDensity(contamination=0.05, **QUICK).fit(X)
    assert (model.predict(X) == -1).mean() == pytest.approx(0.05, abs=1e-9)
    assert model.predict([[3.0, 3.0], [40.0, -40.0]]).tolist() == [1, -1]
    assert model.decision_function(X) == pytest.approx(model.score_samples(X) - model.offset_)
    for wrong in (0, 0.6, "many"):
        with pytest.raises(ValueError, match=r"contamination: expected a number in \(0, 0.5\]"):
            FlowDensity(contamination=wrong).fit(X)


def frame(n=80):
    colour = RNG.choice(["red", "blue"], n)
    return pd.DataFrame(
        {
            "size": RNG.normal(size=n) + 3 * (colour == "red"),
            "colour": pd.Categorical(colour),
            "count": RNG.poisson(2, n),
            "year": RNG.integers(2000, 2020, n),
        }
    )


def test_data_frames_keep_their_columns():
    table = frame()
    model = FlowDensity(context=["year"], bounds={"count": (0, None)}, **QUICK).fit(table)
    assert list(model.feature_names_in_) == list(table.columns)
    assert np.isfinite(model.score_samples(table)).all()
    draws = model.sample(6, context=pd.DataFrame({"year": [2001]}))
    assert list(draws.columns) == list(table.columns)
    assert set(draws["colour"]) <= {"red", "blue"}
    assert (draws["count"] >= 0).all()
    assert (draws["year"] == 2001).all()
    assert np.isfinite(model.score_samples(draws)).all()
    with pytest.raises(ValueError, match="in the same order"):
        model.score_samples(table[["colour", "size", "count", "year"]])
    with pytest.raises(ValueError, match="'size' \\(1 of 80 rows, first in row 3"):
        model.score_samples(table.assign(size=table["size"].where(table.index != 3)))


def test_columns_of_arrays_go_by_number():
    model = FlowDensity(context=[0], columns={1: "number", -1: "drop"}, **QUICK).fit(np.c_[X, X.round(), X[:, 0]])
    assert [c.in_words for c in model.schema_.columns][:3] == ["numbers, given", "numbers", "whole numbers"]
    draws = model.sample(4, context=[[2.5]])
    assert draws.shape == (4, 5)
    assert (draws[:, 0] == 2.5).all()
    assert np.isnan(draws[:, 4]).all()
    with pytest.raises(ValueError, match="context: expected the number of a column, below 2; got 7"):
        FlowDensity(context=[7]).fit(X)


@pytest.mark.parametrize(
    "model",
    ["maf", qf.models.maf, qf.models.maf(5, context=2, blocks=1, hidden=(4,))],
    ids=["name", "function", "flow"],
)
def test_any_model(model):
    options = {} if isinstance(model, qf.Flow) else {"blocks": 1, "hidden": (4,)}
    fitted = FlowDensity(model, model_options=options, max_steps=5).fit(X)
    assert fitted.flow_.config.flow["model"] == "maf"
    assert fitted.flow_.config.flow["hidden"] == (4,)
    assert np.isfinite(fitted.score_samples(X)).all()
    clone(fitted).fit(X)


def test_estimates_are_the_same_at_every_call():
    model = FlowDensity("residual", max_steps=3, model_options={"blocks": 1, "hidden": (8,)}, random_state=0).fit(X)
    assert not model.flow_.exact
    assert (model.score_samples(X) == model.score_samples(X)).all()
    assert (model.sample(4) == model.sample(4)).all()


def test_in_pipelines_and_searches():
    pipeline = make_pipeline(StandardScaler(), FlowDensity(**QUICK))
    assert np.isfinite(cross_val_score(pipeline, X, cv=2)).all()
    # A bow: where the training starts, at columns without correlation, is not where it should end.
    rng = np.random.default_rng(1)
    x = rng.normal(size=200)
    bow = np.stack([x, x**2 + 0.1 * rng.normal(size=200)], 1)
    search = GridSearchCV(pipeline, {"flowdensity__max_steps": [1, 150]}, cv=2).fit(bow)
    assert search.best_params_ == {"flowdensity__max_steps": 150}
    assert search.best_estimator_.score_samples(X).shape == (len(X),)


def test_a_pickle_holds_a_safe_file(monkeypatch):
    model = FlowDensity(**QUICK).fit(frame())
    data = pickle.dumps(model)
    assert b"torch" not in data.replace(b"torch_version", b"")
    same = pickle.loads(data)  # noqa: S301 (our own)
    table = frame()
    assert (same.score_samples(table) == model.score_samples(table)).all()
    assert (same.sample(3) == model.sample(3)).all(axis=None)
    assert same.history_ == model.history_
    assert pickle.loads(pickle.dumps(FlowDensity(max_steps=3))).max_steps == 3  # noqa: S301


def test_the_flow_goes_into_a_file(tmp_path):
    table = frame()
    model = FlowDensity(**QUICK).fit(table)
    qf.save(model.flow_, tmp_path / "m.qf")
    assert (qf.load(tmp_path / "m.qf").score(table) == model.score_samples(table)).all()


def test_a_first_fit_beats_a_gaussian():
    data = load_iris().data
    order = np.random.default_rng(1).permutation(len(data))
    train, test = data[order[:110]], data[order[110:]]
    gaussian = np.array(
        [
            -0.5 * (r @ np.linalg.inv(np.cov(train.T)) @ r + np.log(np.linalg.det(2 * np.pi * np.cov(train.T))))
            for r in test - train.mean(0)
        ]
    ).mean()
    assert FlowDensity(random_state=0).fit(train).score(test) > gaussian


def test_frames_of_polars_need_no_pandas(monkeypatch):
    table = frame()
    other = pl.DataFrame({name: table[name].tolist() for name in table})
    model, same = (FlowDensity(context=["year"], **QUICK).fit(t) for t in (table, other))
    assert (same.score_samples(other) == model.score_samples(table)).all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    draws = same.sample(6, context=pl.DataFrame({"year": [2001]}))
    assert isinstance(draws, pl.DataFrame)
    assert draws.columns == other.columns
    assert draws["colour"].dtype == pl.String
    assert np.isfinite(same.score_samples(draws)).all()
    with pytest.raises(ValueError, match="'size' \\(1 of 80 rows, first in row 3"):
        same.score_samples(other.with_columns(size=pl.Series([None if i == 3 else 0.5 for i in range(80)])))
