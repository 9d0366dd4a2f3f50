"""Schemas say what columns are, and densities of mixed tables sum and integrate to one."""

import itertools
import json
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from registry import far

import quarflow as qf
from quarflow.checkpoint import CheckpointError
from quarflow.table_flow import Labels, defaults, fit_table
from quarflow.tables import Schema, as_table
from quarflow.training import History
from quarflow.transforms import Quantiles

RNG = np.random.default_rng(0)


def make(table, seed=0, scale=0.3, points=8, model=None, **options):
    """A flow with random weights, far from the identity."""
    schema = Schema.of(as_table(table), **options)
    model = {"blocks": 2, "hidden": (4, 3), "points": points, **(model or {})}
    random = far(qf.models.table(schema, **model), scale, seed)
    # `far` moves buffers too: those of the schema have to be as they were.
    flow = qf.models.table(schema, **model).double().eval()
    flow.load_state_dict(random.state_dict())
    return flow


def mass(flow, grid, cell):
    """The sum of densities over the rows of a grid, times the volume of a cell."""
    return float(np.exp(flow.score(grid)).sum() * cell)


def product(**axes):
    """The table of all combinations."""
    rows = list(itertools.product(*axes.values()))
    return {name: [row[i] for row in rows] for i, name in enumerate(axes)}


def middles(low, high, n=4001):
    """The middles of ``n`` cells, and their width."""
    step = (high - low) / n
    return (low + step * (np.arange(n) + 0.5)).tolist(), step


def test_categories_sum_to_one_exactly():
    table = {"colour": ["red", "blue", "red", "green"], "on": [True, False, True, True]}
    flow = make(table)
    grid = product(colour=["blue", "green", "red"], on=[False, True])
    assert flow.exact
    assert mass(flow, grid, 1) == pytest.approx(1, abs=1e-12)
    draws = flow.draw(4000)
    share = np.mean((draws["colour"] == "red") & draws["on"].astype(bool))
    p = math.exp(flow.score({"colour": ["red"], "on": [True]})[0])
    assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))


@pytest.mark.parametrize("seed", [0, 1])
def test_category_and_number(seed):
    table = {"colour": ["red", "blue", "red", "red", "blue"], "size": [10.0, 12.5, 11.0, 19.0, 14.3]}
    flow = make(table, seed)
    x, step = middles(-400, 400, 8001)
    assert mass(flow, product(colour=["red", "blue"], size=x), step) == pytest.approx(1, abs=1e-5)


def test_whole_numbers_sum_to_one():
    table = {"a": RNG.poisson(3, 50), "b": RNG.integers(0, 12, 50)}
    flow = make(table, points=16)
    grid = product(a=range(-40, 50), b=range(-60, 75))
    assert not flow.exact
    assert mass(flow, grid, 1) == pytest.approx(1, abs=2e-3)
    # More places in a cell, nearer to one; the score is the same at every call and in any batch.
    finer = make(table, points=64)
    finer.load_state_dict(flow.state_dict())
    assert abs(mass(finer, grid, 1) - 1) < 5e-4
    some = {"a": [3, 4], "b": [5, 6]}
    assert flow.score(some)[1] == flow.score({"a": [4], "b": [6]})[0]
    draws = flow.draw(500)["a"].astype(float)
    assert (draws == 0).any()
    assert not np.signbit(draws[draws == 0]).any()


def test_a_step_is_reported_per_unit():
    table = {"a": np.round(RNG.normal(5, 1, 60), 1), "c": ["u", "v"] * 30}
    flow = make(table, kinds={"a": 0.1}, points=16)
    grid = product(a=(np.arange(-300, 400) / 10).tolist(), c=["u", "v"])
    assert mass(flow, grid, 0.1) == pytest.approx(1, abs=2e-3)
    draws = flow.draw(50)
    assert np.allclose(draws["a"] * 10, np.round(draws["a"] * 10), atol=1e-9)


@pytest.mark.parametrize(
    ("bounds", "low", "high"), [((0, 1), 0, 1), ((-2, None), -2, 400), ((None, 3), -400, 3), ((-2, 3), -2, 3)]
)
def test_bounded_columns(bounds, low, high):
    table = {"a": RNG.uniform(0.2, 0.9, 40), "c": ["u", "v"] * 20}
    flow = make(table, bounds={"a": bounds}, scale=0.2)
    x, step = middles(low, high, 40_001)
    assert mass(flow, product(a=x, c=["u", "v"]), step) == pytest.approx(1, abs=2e-3)
    draws = flow.draw(200)["a"]
    assert draws.min() >= low
    assert draws.max() <= high
    edges = [edge for edge in bounds if edge is not None]
    assert np.isfinite(flow.score({"a": edges, "c": ["u"] * len(edges)})).all()
    with pytest.warns(UserWarning, match="'a': values outside .* 1 of 2 rows, first in row 1"):
        assert flow.score({"a": [0.5, -900 if bounds[0] is not None else 900], "c": ["u", "v"]})[1] == -math.inf


@pytest.mark.parametrize("bounds", [(0, 9), (0, None), (None, 9)])
def test_bounded_whole_numbers(bounds):
    flow = make({"a": [0, 1, 2, 3, 9, 4, 4, 2, 1, 0], "c": ["u", "v"] * 5}, bounds={"a": bounds}, points=32, scale=0.2)
    low, high = bounds
    values = range(-600 if low is None else low, (600 if high is None else high) + 1)
    assert mass(flow, product(a=values, c=["u", "v"]), 1) == pytest.approx(1, abs=1e-2)
    draws = flow.draw(300)["a"]
    assert set(draws) <= set(map(float, values))
    assert np.isfinite(flow.score({"a": draws, "c": ["u"] * 300})).all()


def test_values_on_the_edges_of_rounded_bounds_are_possible():
    values = np.array([0.3, 0.5, 0.9, 0.7, 0.3])
    flow = make({"a": values}, kinds={"a": 0.1}, bounds={"a": (0.3, 0.9)})
    assert np.isfinite(flow.score({"a": values})).all()
    assert mass(flow, {"a": np.arange(3, 10) / 10}, 0.1) == pytest.approx(1, abs=1e-2)


def test_heavy_tails():
    values = np.concatenate([RNG.normal(0, 1, 60), [400.0, -90.0]])
    flow = make({"a": values, "c": ["u", "v"] * 31}, scale=0.2)
    assert flow.schema.numbers[0].heavy
    x, _ = middles(-9, 9, 20_001)
    x = np.sinh(x) * 50
    density = np.exp(flow.score(product(a=x.tolist(), c=["u", "v"]))).reshape(-1, 2).sum(1)
    assert np.trapezoid(density, x) == pytest.approx(1, abs=1e-4)
    assert not Schema.of(as_table({"a": values}), tails=False).numbers[0].heavy
    assert Schema.of(as_table({"a": values[:60]}), tails=True).numbers[0].heavy


def test_methods_for_tensors_point_to_those_for_tables():
    flow = make({"a": [0.1, 0.5, 2.5], "b": [1.25, 0.75, 0.5]})
    for call in (lambda: flow.sample_given(3, torch.zeros(1)), lambda: flow.log_prob_terms(torch.zeros(1, 2))):
        with pytest.raises(ValueError, match=r"score\(table, columns=..., given=...\).*draw\(n, given=...\)"):
            call()


def test_context_is_given_not_modelled():
    table = {"year": [2001, 2002, 2003, 2004], "kind": ["u", "v", "v", "u"], "size": [1.5, 2.5, 2.0, 1.0]}
    flow = make(table, context=["year", "kind"])
    x, step = middles(-200, 200, 16001)
    for year, kind in ((2001, "u"), (2003, "v"), (1999, "v")):
        assert mass(flow, product(year=[year], kind=[kind], size=x), step) == pytest.approx(1, abs=1e-5)
    draws = flow.draw(3, given={"year": [2002], "kind": ["v"]})
    assert list(draws) == ["year", "kind", "size"]
    assert list(draws["kind"]) == ["v"] * 3
    with pytest.raises(ValueError, match=r"'kind', row 0: expected one of .* got 'w'"):
        flow.draw(1, given={"year": [2002], "kind": ["w"]})
    with pytest.raises(ValueError, match="given: expected a table with the columns of the context, 'year', 'kind'"):
        flow.draw(1)
    with pytest.raises(ValueError, match="given: expected 1 row, or 3"):
        flow.draw(3, given={"year": [1, 2], "kind": ["u", "u"]})


def test_units_of_a_linear_flow_are_those_of_the_table():
    # An exact answer: one block that is the identity, standardised by the table's own moments, is a Gaussian.
    x = np.array([1e6 + v for v in (0.0, 3.0, 1.0, 7.5, 2.25)])
    flow = qf.models.table(Schema.of(as_table({"a": x})), model="maf", blocks=1, hidden=(4,), actnorm=False).double()
    flow.initialise(torch.as_tensor(flow.schema.encode(as_table({"a": x})).x))
    with torch.no_grad():
        for p in flow.parameters():
            p.zero_()
    mean, deviation = x.mean(), x.std(ddof=1)
    normal = -0.5 * ((x - mean) / deviation) ** 2 - 0.5 * math.log(2 * math.pi) - math.log(deviation)
    assert flow.eval().score({"a": x}) == pytest.approx(normal, abs=1e-9)


def test_constants_and_duplicates_are_dropped():
    table = {"one": [1.0] * 4, "a": [1.5, 2.0, 4.0, 3.5], "same": [1.5, 2.0, 4.0, 3.5], "text": ["x"] * 4}
    with pytest.warns(UserWarning, match="dropped") as said:
        flow = make(table)
    assert {"constant 1.0, dropped", "a duplicate of 'a', dropped", "constant 'x', dropped"} == {
        str(w.message).split(": ")[1] for w in said
    }
    alone = make({"a": table["a"]})
    alone.load_state_dict(flow.state_dict())
    assert (flow.score(table) == alone.score({"a": table["a"]})).all()
    draws = flow.draw(3)
    assert list(draws) == list(table)
    assert (draws["same"] == draws["a"]).all()
    with pytest.warns(UserWarning, match="'one': values that differ .* They do not count"):
        flow.score(table | {"one": [1.0, 1.0, 2.0, 1.0]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="expected a column that varies"):
            Schema.of(as_table({"one": [1.0] * 4}))


def test_an_atom_is_pointed_out():
    values = np.where(np.arange(40) % 3 == 0, 0.5, RNG.normal(size=40))
    with pytest.warns(UserWarning, match="'a': one value is in 14 of 40 rows, where numbers have no density"):
        Schema.of(as_table({"a": values}), {"a": "number"})
    with pytest.warns(UserWarning, match="'a': one value is in 14 of 40 rows, where numbers have no density"):
        Schema.of(as_table({"a": np.abs(values)}), bounds={"a": (0, None)})
    Schema.of(as_table({"a": values, "b": RNG.normal(size=40)}), context=["a"])


def test_a_nearly_constant_column_is_named():
    table = as_table({"a": RNG.normal(size=30), "flat": np.where(np.arange(30) == 3, 2.25, 1.5)})
    with pytest.warns(UserWarning, match="'flat': one value"):
        flow = qf.models.table(Schema.of(table, {"flat": "number"}), blocks=1, hidden=(4,))
    # The row that differs is held out for validation, or not among those that layers start from.
    x = flow.schema.encode(table).x[np.arange(30) != 3]
    for learn in (lambda: qf.fit(flow, x, max_steps=1), lambda: flow.initialise(torch.as_tensor(x).float())):
        with pytest.raises(ValueError, match=r"column 'flat': expected numbers that vary; .* in each of \d+ rows"):
            learn()


def test_numbers_that_repeat_have_a_width_and_a_density_with_a_limit():
    rows, rng = 1000, np.random.default_rng(0)
    often = np.where(np.arange(rows) % 3 == 0, 0.5, rng.normal(size=rows))
    rounded = np.round(rng.normal(size=rows), 1) + 0.037
    schema = Schema.of(as_table({"often": often, "rounded": rounded, "not": rng.normal(size=rows)}))
    found = {column.name: column.width for column in schema.columns}
    assert found["not"] == 0
    assert found["rounded"] == pytest.approx(0.1)
    spread = schema.columns[0].scale
    assert found["often"] == pytest.approx(2.698 * spread / 10)  # 2 IQR over the third root of 1000
    assert str(schema).splitlines()[1] == "rounded: numbers that repeat, 0.1 wide"
    flow, _ = fit_table({"often": often}, max_steps=200)
    assert Schema.from_json(flow.schema.to_json()) == flow.schema
    # What is learnt is the density of numbers that far apart: a third of the rows over the width, and not much more.
    axis = np.linspace(-8, 8, 4001)
    density = np.exp(flow.score({"often": axis}))
    assert abs(np.trapezoid(density, axis) - 1) < 1e-3
    assert density.max() < 2 / 3 / found["often"]
    draws = flow.draw(500)["often"]
    assert 0.2 < (np.abs(draws - 0.5) < found["often"] / 2 + 0.05).mean() < 0.6
    assert len(np.unique(draws)) == 500


def test_what_columns_are_found_to_be():
    frame = pd.DataFrame(
        {
            "int": pd.array([1, 2, 3, 4], dtype="Int64"),
            "whole": [1.0, 2.0, 9.0, 4.0],
            "text": pd.array(["a", "b", "a", "b"], dtype="string"),
            "cat": pd.Categorical(["a", "b", "b", "c"]),
            "flag": [True, True, False, True],
            "size": np.array([1.5, 2.5, 1.0, 0.5], dtype="float32"),
            "share": [0.5, 0.25, 0.125, 1.0],
        }
    )
    schema = Schema.of(as_table(frame), bounds="found")
    assert str(schema).splitlines() == [
        "int: whole numbers from 0",
        "whole: whole numbers from 0",
        "text: 2 categories",
        "cat: 3 categories",
        "flag: 2 categories",
        "size: numbers from 0",
        "share: numbers from 0 to 1",
    ]
    same = Schema.from_json(schema.to_json())
    assert same == schema
    again = same.decode(schema.encode(as_table(frame)).x)
    for name, values in as_table(frame).items():
        if values.dtype.kind == "f":
            assert np.allclose(again[name], values, atol=1e-5), name
        else:
            assert list(again[name]) == list(values), name


def test_large_offsets_keep_their_digits():
    # Seconds since 1970, an hour of them: float32 would know them to two minutes.
    seconds = 1.7e9 + 3600 * RNG.random(400)
    flow = qf.models.table(Schema.of(as_table({"t": seconds})), blocks=1, hidden=(4,))
    qf.fit(flow, flow.schema.encode(as_table({"t": seconds})).x, max_steps=30)
    assert flow.score({"t": seconds}).mean() == pytest.approx(-math.log(3600), abs=0.5)


def test_a_rare_category_does_not_stop_the_training():
    table = as_table({"flag": [True] + [False] * 99, "a": RNG.normal(size=100), "n": [1] + [0] * 99})
    flow = qf.models.table(Schema.of(table), blocks=1, hidden=(4,))
    for seed in range(3):
        qf.fit(flow, flow.schema.encode(table).x, max_steps=5, seed=seed)
    assert np.isfinite(flow.score(table)).all()


@pytest.mark.parametrize(
    "table", [{"c": ["u", "v", "v"] * 20, "d": [True, False] * 30}, {"n": [1, 2, 2, 5] * 15}], ids=["labels", "whole"]
)
def test_tables_of_one_kind(table):
    flow, _ = fit_table(table, max_steps=30)
    if "c" in table:
        entropy = math.log(3) - 2 / 3 * math.log(2) + math.log(2)
        assert flow.score(table).mean() == pytest.approx(-entropy, abs=0.02)
    assert -3 < flow.score(table).mean() < 0
    assert list(flow.draw(5)) == list(table)


def test_columns_that_determine_each_other_have_a_finite_density():
    celsius = RNG.normal(15, 8, 300)
    table = {"celsius": celsius, "fahrenheit": 1.8 * celsius + 32}
    flow, _ = fit_table(table, max_steps=20)
    assert np.isfinite(flow.score(table)).all()
    draws = flow.draw(100)
    assert np.abs(1.8 * draws["celsius"] + 32 - draws["fahrenheit"]).max() < 1


def test_given_numbers_need_not_be_whole():
    table = {"year": [2001, 2002, 2003, 2004] * 5, "size": RNG.normal(size=20)}
    flow, _ = fit_table(table, context="year", max_steps=5, model_options={"blocks": 1, "hidden": (4,)})
    between = flow.score({"year": [2001.0, 2001.5, 2002.0], "size": [0.1, 0.1, 0.1]})
    assert len(set(between)) == 3


def test_rows_to_validate_on_may_be_a_table():
    rng = np.random.default_rng(0)
    table = {"a": rng.normal(size=100), "c": ["u", "v"] * 50, "year": [1.5, 2.5] * 50}
    other = {"year": [2.5, 1.5, 1.5], "a": [0.0, 1.0, 30.0], "c": ["u", "u", "v"]}
    flow, history = fit_table(table, context=["year"], validation=other, max_steps=20, patience=None)
    assert flow.score(other).mean() == pytest.approx(history.best_validation, abs=1e-3)
    other["c"] = ["u", "w", "v"]
    with (
        pytest.warns(UserWarning, match="probability zero"),
        pytest.raises(ValueError, match=r"validation: expected rows that .* got 1 with"),
    ):
        fit_table(table, context=["year"], validation=other, max_steps=1)


def test_time_alone_leaves_the_steps_of_few_rows(monkeypatch):
    asked = []

    def fit(*rows, **options):
        asked.append(options["max_steps"])
        return History()

    monkeypatch.setattr("quarflow.table_flow.fit", fit)
    for rows, max_steps in itertools.product((100, 1000), (None, 7)):
        fit_table({"a": RNG.normal(size=rows)}, max_seconds=1.0, max_steps=max_steps, model_options={"knots": 0})
    assert asked == [defaults(100, 1)["fit"]["max_steps"], 7, None, 7]


def bends(flow):
    return any(isinstance(step, Quantiles) for step in flow.modules())


@pytest.mark.parametrize("better", [True, False])
def test_a_short_run_chooses_where_to_start(monkeypatch, better):
    runs = []

    def fit(flow, x, *rest, max_steps, **options):
        runs.append((bends(flow), max_steps))
        for p in flow.parameters():
            p.data += 1.0
        return History([max_steps], best_validation=float(bends(flow) == better))

    monkeypatch.setattr("quarflow.table_flow.fit", fit)
    table = {"a": RNG.normal(size=1000)}
    flow, _ = fit_table(table, max_steps=2000)
    assert runs == [(True, 100), (False, 100), (better, 2000)]
    assert bends(flow) == better
    # A run of few steps has none to spare, and who says what to take need not wait.
    for options in ({"max_steps": 100}, {"max_steps": 2000, "model_options": {"knots": 9}}):
        runs.clear()
        fit_table(table, **options)
        assert runs == [(True, options["max_steps"])]


def test_an_interrupt_of_the_short_run_is_one_of_the_run(monkeypatch):
    histories = []

    def fit(flow, x, *rest, **options):
        histories.append(History(stopped="interrupted"))
        return histories[-1]

    monkeypatch.setattr("quarflow.table_flow.fit", fit)
    _, history = fit_table({"a": RNG.normal(size=1000)}, max_steps=2000)
    assert histories == [history]


def test_learns_what_depends_on_what():
    # P(colour) = (0.3, 0.7); size | colour = N(0, 1) or N(5, 1); count | colour = Poisson(1) or Poisson(6).
    n = 2000
    red = RNG.random(n) < 0.3
    table = as_table(
        {
            "colour": np.where(red, "red", "blue").astype(object),
            "size": np.where(red, RNG.normal(0, 1, n), RNG.normal(5, 1, n)),
            "count": np.where(red, RNG.poisson(1, n), RNG.poisson(6, n)),
        }
    )
    rate = np.where(red, 1, 6)
    truth = (
        np.log(np.where(red, 0.3, 0.7))
        - 0.5 * (table["size"] - np.where(red, 0, 5)) ** 2
        - 0.5 * math.log(2 * math.pi)
        + table["count"] * np.log(rate)
        - rate
        - np.array([math.lgamma(k + 1) for k in table["count"]])
    )
    flow = qf.models.table(Schema.of(table, bounds={"count": (0, None)}), blocks=3, hidden=(8, 8), points=2)
    torch.manual_seed(0)
    qf.fit(flow, flow.schema.encode(table).x, max_steps=300)
    assert flow.score(table).mean() == pytest.approx(truth.mean(), abs=0.12)
    draws = flow.draw(2000)
    reds = draws["colour"] == "red"
    assert reds.mean() == pytest.approx(0.3, abs=0.05)
    assert draws["count"][reds].mean() == pytest.approx(1, abs=0.3)
    assert draws["size"][~reds].mean() == pytest.approx(5, abs=0.3)


def test_a_saved_flow_knows_its_schema(tmp_path):
    table = {"colour": ["red", "blue", "red", "green"], "size": [1.5, 2.5, 3.0, 4.0], "n": [1, 5, 2, 94110]}
    flow = make(table, bounds={"n": (0, None)})
    qf.save(flow, tmp_path / "m.qf")
    same = qf.load(tmp_path / "m.qf")
    assert same.schema == flow.schema
    assert (same.score(table) == flow.score(table)).all()
    with pytest.raises(ValueError, match="expected the columns 'size' too"):
        same.score({"colour": ["red"], "n": [1]})
    with pytest.warns(UserWarning, match="'colour': categories that were not in the training table in 1 of 1 rows"):
        assert same.score({"colour": ["mauve"], "size": [1.5], "n": [1]})[0] == -math.inf


def test_a_damaged_schema_is_refused(tmp_path):
    flow = make({"a": [1.5, 2.5, 3.0]})
    good = flow.schema.to_json()
    columns = json.loads(good)
    bad = ["[", "{}", "[1]", json.dumps(columns * 2), json.dumps([columns[0] | {"scale": 0.0}])]
    bad += [json.dumps([columns[0] | {"kind": "text"}]), json.dumps([columns[0] | {"source": "b"}])]
    bad += [json.dumps([{k: v for k, v in columns[0].items() if k != "name"}])]
    for text in bad:
        object.__setattr__(flow.config, "schema", text)
        with pytest.raises(ValueError, match=r"schema|column|support|kind|scale"):
            flow.config.build()
    qf.save(make({"a": [1.5, 2.5, 3.0]}), tmp_path / "m.qf")
    data = (tmp_path / "m.qf").read_bytes()
    (tmp_path / "m.qf").write_bytes(data.replace(b"line", b"lime"))
    with pytest.raises(CheckpointError, match="support"):
        qf.load(tmp_path / "m.qf")


def test_labels_are_given_their_context():
    labels = far(Labels([2, 3], context=1, hidden=4))
    codes = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    for c in (-1.0, 2.0):
        assert labels(codes, torch.full((6, 1), c).double()).logsumexp(0).item() == pytest.approx(0, abs=1e-12)
    assert labels.sample(torch.zeros(5, 1).double()).shape == (5, 2)


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"a": [1.5, None, 2.0], "b": [1.0, 2.0, math.inf]}, {}, ValueError, r"'a' \(1 of 3 rows.* row 1.*'b' \(1 of"),
        ({"c": ["u", None, "v"]}, {}, ValueError, r"missing values \(NaN\).*'c'"),
        ({"a": [1.5]}, {}, ValueError, "got 1 sample"),
        ({"a": [1.5, 2.0], "b": [1.0]}, {}, ValueError, "columns of one length"),
        ({"a": [1.5, "two"]}, {}, ValueError, "either text or numbers; got both, such as 'two' in row 1"),
        ({"a": [1.5, {}]}, {}, TypeError, "argument must be a string or a number; got dict"),
        ({"a": [[1, 2], [3, 4]]}, {}, TypeError, "got list"),
        ({"a": np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]")}, {}, ValueError, "datetime64"),
        ({"id": [f"k{i}" for i in range(30)]}, {}, ValueError, "30 different values in 30 rows.*'drop'"),
        ({"a": [1.5, 2.5]}, {"kinds": {"a": "integer"}}, ValueError, "row 0: expected whole numbers; got .*1.5"),
        ({"a": [1.5, 2.5]}, {"kinds": {"a": "real"}}, ValueError, "one of 'number'"),
        ({"a": [1.5, 2.5]}, {"kinds": {"b": "number"}}, ValueError, "columns: expected columns of the table, 'a'"),
        ({"a": ["u", "v"]}, {"kinds": {"a": "number"}}, ValueError, "declared 'number'; got no numbers"),
        ({"a": [1.5, 2.5]}, {"bounds": {"a": (2, 1)}}, ValueError, "low < high"),
        ({"a": [1.5, 2.5]}, {"bounds": {"a": 3}}, ValueError, r"expected \(low, high\)"),
        ({"a": [1.5, 2.5]}, {"bounds": {"a": (2, 3)}}, ValueError, "within 2 to 3; got 1.5 in row 0"),
        ({"a": [1, 2]}, {"bounds": {"a": (0.5, None)}}, ValueError, "multiple of 1"),
        ({"a": ["u", "v"]}, {"bounds": {"a": (0, 1)}}, ValueError, "holds categories"),
        ({"a": [1.5, 2.5]}, {"bounds": "all"}, ValueError, "or 'found'; got 'all'"),
        ({"a": [1.5, 2.5]}, {"tails": "heavy"}, ValueError, "tails: expected one of"),
        ({"a": [1.5, 2.5]}, {"context": ["a"]}, ValueError, "expected a column that varies, and is not given"),
        ({"a": [1.5, 2.5], "b": [1.5, 3.5]}, {"context": ["a"], "kinds": {"a": "drop"}}, ValueError, "not dropped"),
    ],
)
def test_errors_of_a_schema(table, options, error, message):
    with pytest.raises(error, match=message):
        Schema.of(as_table(table), **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": [1.5], "c": ["u"]}, "'n', row 7: expected whole numbers; got .*1.5"),
        ({"n": ["1"], "c": ["u"]}, "'n', row 7: expected numbers, as in training; got '1'"),
        ({"n": [1], "c": [1]}, "'c', row 7: expected text, as in training"),
        ({"n": [math.nan], "c": ["u"]}, r"'n' \(1 of 1 rows, first in row 7\)"),
        ({"n": [], "c": []}, "at least one row"),
    ],
)
def test_errors_of_rows(row, message):
    flow = make({"n": [1, 2, 5], "c": ["u", "v", "v"]})
    with pytest.raises(ValueError, match=message):
        flow.score(row, first_row=7)


def test_quantiles_become_normal():
    torch.manual_seed(0)
    x = torch.stack([torch.rand(5000), torch.randn(5000).exp(), torch.randint(0, 5, (5000,)) + torch.rand(5000)], 1)
    x = x.double() * torch.tensor([1e-6, 1.0, 1e6]) + torch.tensor([0.0, 5.0, 1e7])
    t = Quantiles(3, knots=50).double()
    z = t.initialise(x)
    p = torch.linspace(0.06, 0.94, 23, dtype=torch.float64)
    assert (torch.quantile(z, p, dim=0) - torch.special.ndtri(p)[:, None]).abs().max() < 0.02
    far = x.mean(0) + x.std(0) * torch.linspace(-100, 100, 41, dtype=torch.float64)[:, None]
    back = t.inverse(t(far)[0])[0]
    assert torch.allclose(back, far, rtol=1e-9)
    assert (t(far)[0].diff(dim=0) > 0).all()


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0] * 99 + [1.0], list(range(10)), [1.0, 1.0 + 1e-9] * 5 + [2.0]])
def test_quantiles_of_repeated_values_are_finite(values):
    x = torch.tensor(values, dtype=torch.float64)[:, None]
    t = Quantiles(1, knots=20).double()
    z, ladj = t(torch.cat([t.inverse(t.initialise(x))[0], torch.linspace(-5, 5, 101, dtype=torch.float64)[:, None]]))
    assert torch.isfinite(z).all()
    assert ladj.abs().max() < 20
    assert torch.allclose(t.inverse(z)[0][: len(x)], x, atol=1e-3)


@pytest.mark.parametrize("model", ["maf", qf.models.quar(2, blocks=1, hidden=(4,))], ids=["name", "pattern"])
def test_every_model_of_a_table_gets_its_quantiles(model):
    table = {"a": RNG.normal(size=50), "b": RNG.normal(size=50)}
    for options, knots in (({}, [8]), ({"knots": 5}, [5]), ({"knots": 0}, [])):
        flow, _ = fit_table(table, model=model, model_options=options, max_steps=1)
        assert [m.gaps.shape[1] + 1 for m in flow.modules() if isinstance(m, Quantiles)] == knots
