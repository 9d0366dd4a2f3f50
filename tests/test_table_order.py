"""Tables whose columns keep one order: densities of first columns, of later ones given these, and of rows with gaps."""

import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from test_tables import make, middles, product
from torch.distributions import MultivariateNormal

import quarflow as qf
from quarflow.estimator import FlowDensity
from quarflow.table_flow import fit_table
from quarflow.tables import Schema, as_table

RNG = np.random.default_rng(0)
NUMBERS = dict(zip("abcd", (RNG.normal(size=(60, 4)) @ RNG.normal(size=(4, 4)) * [1, 50, 0.1, 3] + 7).T, strict=True))
ORDER = ["c", "a", "b", "d"]
QUICK = {"max_steps": 5, "model_options": {"blocks": 1, "hidden": (4,)}}
IN_ORDER = {"mixing": None}
MIXED = {
    "colour": ["red", "blue", "red", "red", "blue", "red"],
    "on": [True, False, True, True, False, False],
    "n": [0, 3, 1, 2, 2, 5],
    "share": [0.2, 0.5, 0.7, 0.31, 0.9, 0.4],
    "size": [1.5, 2.25, 4.0, 2.5, 0.3, -1.0],
}


def gaussian(**options):
    """A table's flow that is affine in ``a .. d``, and its density by linear algebra."""
    schema = Schema.of(as_table(NUMBERS), first=["c", "a"], missing=options.get("missing", "error"))
    flow = qf.models.table(schema, "maf", blocks=1, hidden=(), **IN_ORDER, **options).double()
    x = torch.as_tensor(schema.encode(as_table(NUMBERS)).x)
    torch.manual_seed(0)
    flow.initialise(x)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            p.normal_(0, 0.3)
            if name.endswith("layers.0.weight"):
                p[1::2] = 0  # the scales are constant
        zero = torch.zeros(1, 4, dtype=torch.float64)
        shift = flow.transform(zero)[0][0]
        a = torch.stack([flow.transform(zero + e)[0][0] - shift for e in torch.eye(4).double()], 1)
    location, scale = torch.tensor([[c.location, c.scale] for c in schema.numbers], dtype=torch.float64).T
    mean = torch.linalg.solve(a, -shift) * scale + location
    covariance = torch.linalg.inv(a.mT @ a) * scale * scale[:, None]
    return flow.eval(), MultivariateNormal(mean, 0.5 * (covariance + covariance.mT))


def prefix(truth, k):
    return MultivariateNormal(truth.mean[:k], truth.covariance_matrix[:k, :k])


def test_a_gaussian_is_known():
    flow, truth = gaussian()
    assert flow.schema.order == ORDER
    x = torch.tensor(np.stack([NUMBERS[name] for name in ORDER], 1))
    assert flow.score(NUMBERS) == pytest.approx(truth.log_prob(x).numpy(), rel=1e-9)
    for k in (1, 2, 3):
        first = {name: NUMBERS[name] for name in ORDER[:k]}
        expected = prefix(truth, k).log_prob(x[:, :k]).numpy()
        assert flow.score(first, columns=reversed(ORDER[:k])) == pytest.approx(expected, rel=1e-9)
        for end in range(k + 1, 5):
            found = flow.score(NUMBERS, columns=ORDER[k:end], given=ORDER[:k])
            assert found == pytest.approx(prefix(truth, end).log_prob(x[:, :end]).numpy() - expected, abs=1e-8)
        assert flow.score(NUMBERS, given=ORDER[:k]) == pytest.approx(truth.log_prob(x).numpy() - expected, abs=1e-8)
    known, n = x[3, :2], 20_000
    draws = flow.draw(n, given={"a": known[1:], "c": known[:1]}, generator=torch.Generator().manual_seed(0))
    assert list(draws) == list("abcd")
    assert (draws["a"] == known[1].item()).all()
    assert (draws["c"] == known[0].item()).all()
    s = truth.covariance_matrix
    gain = torch.linalg.solve(s[:2, :2], s[:2, 2:]).mT
    rest = s[2:, 2:] - gain @ s[:2, 2:]
    found = torch.tensor(np.stack([draws["b"], draws["d"]], 1))
    error = found.mean(0) - (truth.mean[2:] + gain @ (known - truth.mean[:2]))
    assert (error.abs() < 4 * (rest.diagonal() / n).sqrt()).all()
    scale = rest.diagonal().sqrt()
    assert ((found.mT.cov() - rest).abs() < 4 * 2**0.5 * scale * scale[:, None] / n**0.5).all()


def test_gaps_of_a_gaussian_are_integrated_out():
    flow, truth = gaussian(missing="marginal")
    x = torch.tensor(np.stack([NUMBERS[name] for name in ORDER], 1))
    table = {name: values.copy() for name, values in NUMBERS.items()}
    counts = np.arange(60) % 5  # of the columns that are there
    for i, name in enumerate(ORDER):
        table[name][counts <= i] = np.nan
    expected = [prefix(truth, k).log_prob(row[:k]).item() if k else 0.0 for k, row in zip(counts, x, strict=True)]
    assert flow.score(table) == pytest.approx(expected, rel=1e-9)
    # Part by part, the same; and NaN marks what is missing in tensors as well.
    assert (flow.score({name: values[7:9] for name, values in table.items()}) == flow.score(table)[7:9]).all()
    rows = torch.as_tensor(flow.schema.encode(as_table(table), gaps=True).x)
    assert flow.log_prob(rows).detach().numpy() == pytest.approx(expected, rel=1e-9)
    assert qf.evaluate(flow, rows).nats == pytest.approx(np.mean(expected), rel=1e-9)
    # What is asked for and missing counts nothing; what is given and missing leaves nothing to ask.
    given = flow.score(table, columns=["a", "b"], given=["c"])
    assert (given[counts <= 1] == 0).all()
    both = prefix(truth, 2).log_prob(x[:, :2]) - prefix(truth, 1).log_prob(x[:, :1])
    assert given[counts == 2] == pytest.approx(both.numpy()[counts == 2], abs=1e-9)


@pytest.mark.parametrize("missing", ["error", "marginal"])
def test_first_columns_are_sums_and_integrals(missing):
    flow = make(MIXED, bounds={"share": (0, 1)}, model={**IN_ORDER, "missing": missing}, scale=0.2, points=16)
    names = ["colour", "on", "n", "share", "size"]
    assert flow.schema.order == names
    size, step = middles(-300, 300, 6001)
    share, cell = middles(0, 1, 301)
    counts = list(range(-60, 80))
    row = {"colour": ["blue"], "on": [True], "n": [2], "share": [0.4], "size": [1.0]}
    axes = {"colour": ["red", "blue"], "on": [False, True], "n": counts, "share": share, "size": size}
    widths = {"colour": 1, "on": 1, "n": 1, "share": cell, "size": step}
    densities = []
    for k in range(1, 5):
        # One more column, summed or integrated over its axis, leaves those before it.
        grid = product(**{**{name: row[name] for name in names[:k]}, names[k]: axes[names[k]]})
        total = np.exp(flow.score(grid, columns=names[: k + 1])).sum() * widths[names[k]]
        density = math.exp(flow.score(row, columns=names[:k])[0])
        assert total == pytest.approx(density, rel=2e-3), names[:k]
        given = np.exp(flow.score(grid, columns=[names[k]], given=names[:k])).sum() * widths[names[k]]
        assert given == pytest.approx(1, abs=2e-3)
        densities.append(density)
        if missing == "marginal":
            gappy = {name: row[name] if name in names[:k] else [None] for name in names}
            assert math.exp(flow.score(gappy)[0]) == pytest.approx(density, rel=1e-12)
    assert sum(np.exp(flow.score({"colour": ["red", "blue"]}, columns="colour"))) == pytest.approx(1, abs=1e-12)


def test_draws_given_whole_numbers_are_those_of_the_density():
    # Out in the tail the density of n falls steeply in its cell, and what depends on n is drawn from its near side.
    n = np.round(RNG.normal(0, 0.5, 400))
    table = as_table({"n": n, "size": 2 * n + 0.2 * RNG.normal(size=400)})
    schema = Schema.of(table, tails=False)
    flow = qf.models.table(schema, "maf", blocks=1, hidden=(4,), points=16, **IN_ORDER).double()
    flow.initialise(torch.as_tensor(schema.encode(table).x))
    with torch.no_grad():
        for p in flow.parameters():
            p.zero_()  # then it is the Gaussian of the table
    x, cell = middles(-6, 12, 6001)
    density = np.exp(flow.eval().score({"n": [2] * len(x), "size": x}, given=["n"])) * cell
    mean = float(density @ x)
    deviation = float(density @ (np.array(x) - mean) ** 2) ** 0.5
    draws = flow.draw(4000, given={"n": [2]}, generator=torch.Generator().manual_seed(0))
    assert set(draws["n"]) == {2}
    assert draws["size"].mean() == pytest.approx(mean, abs=4 * deviation / 4000**0.5)
    assert draws["size"].std() == pytest.approx(deviation, rel=0.1)
    assert mean < 3  # from places in the cell that count the same it is 3.36


def test_categories_are_drawn_given_those_before_them():
    flow, n = make(MIXED, model=IN_ORDER), 4000
    share = math.exp(flow.score({"colour": ["blue"], "on": [True]}, columns=["on"], given=["colour"])[0])
    on = flow.draw(n, given={"colour": ["blue"]}, generator=torch.Generator().manual_seed(0))["on"]
    assert np.mean(on.astype(bool)) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))


def test_categories_have_a_density_of_their_own_in_any_model():
    flow = make(MIXED)
    assert not flow.in_one_order
    found = np.exp(flow.score(product(colour=["red", "blue"], on=[True, False]), columns=["on", "colour"]))
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert len(flow.draw(3, given={"colour": ["red"], "on": [False]})["n"]) == 3
    for call in (
        lambda: flow.score(MIXED, columns=["colour", "on", "n"]),
        lambda: flow.score(MIXED, given=["colour", "on", "n"]),
        lambda: flow.draw(3, given={"colour": ["red"], "on": [False], "n": [1]}),
    ):
        with pytest.raises(ValueError, match=r"keep one order.*Fit with first=.*--first.*mixing=None"):
            call()


def test_columns_out_of_order_are_refused():
    flow, _ = gaussian()
    for call, message in (
        (lambda: flow.score(NUMBERS, columns=["a"]), "columns: expected the first .* 'c', 'a', 'b', 'd'; got 'a'"),
        (lambda: flow.score(NUMBERS, columns=["a"], given=["b"]), "given: expected the first columns"),
        (lambda: flow.score(NUMBERS, columns=["e"]), "columns: expected the first columns"),
        (lambda: flow.score(NUMBERS, columns=["c"], given=["c"]), "columns: expected one or more that are not given"),
        (lambda: flow.score(NUMBERS, columns=[]), "columns: expected one or more"),
        (lambda: flow.score({"c": [1.5]}, columns=["c", "a"]), "table: expected the columns 'a' too"),
        (lambda: flow.draw(2, given={"b": [1.0]}), "given: expected the first columns"),
        (lambda: flow.draw(2, given={name: [1.0] for name in "abcd"}), "expected a column that is left"),
        (lambda: flow.draw(2, given={"e": [1.0]}), "given: expected columns of 'a', 'b', 'c', 'd'; got 'e'"),
        (lambda: flow.draw(2, given={"c": [math.nan]}), r"'c' \(1 of 1 rows"),
        (lambda: flow.draw(2, given={"c": [1.0, 2.0, 3.0]}), "given: expected 1 row, or 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    mixed = make(MIXED, bounds={"share": (0, 1)}, model=IN_ORDER)
    with pytest.raises(ValueError, match="given: column 'colour': categories that were not in the training table"):
        mixed.draw(2, given={"colour": ["mauve"]})


@pytest.mark.parametrize(
    ("first", "context", "message"),
    [
        (["size"], (), "first: expected categories before numbers.*'colour', 'on'; got 'size'. Name the categories"),
        (["size", "on"], (), "first: expected categories before numbers"),
        (["colour", "size"], (), "first: expected categories before numbers"),
        (["height"], (), "first: expected columns of the table"),
        (["size"], ["size"], "first: expected columns that are modelled"),
    ],
)
def test_errors_of_an_order(first, context, message):
    with pytest.raises(ValueError, match=message):
        Schema.of(as_table(MIXED), first=first, context=context)


def test_fit_keeps_the_order_that_is_asked_for(tmp_path):
    flow, _ = fit_table(MIXED, first=["on", "colour", "size"], **QUICK)
    assert flow.in_one_order
    assert flow.schema.order == ["on", "colour", "size", "n", "share"]
    assert [c.name for c in flow.schema.columns] == list(MIXED)
    qf.save(flow, tmp_path / "m.qf")
    same = qf.load(tmp_path / "m.qf")
    assert same.schema == flow.schema
    some = {"on": [True], "colour": ["red"], "size": [1.5]}
    assert same.score(some, columns=some) == flow.score(some, columns=some)
    assert list(flow.draw(2, given=some)) == list(MIXED)
    # A single name; a model of its own; and what cannot keep an order.
    assert fit_table(NUMBERS, first="d", model="maf", **QUICK)[0].schema.order == ["d", "a", "b", "c"]
    assert fit_table(NUMBERS, first=["d"], model=qf.models.quar, **QUICK)[0].in_one_order
    for options in ({"model": "realnvp"}, {"model_options": {"blocks": 2, "hidden": (4,), "mixing": "lu"}}):
        for asked, name in (({"first": ["d"]}, "first"), ({"missing": "marginal"}, "missing='marginal'")):
            with pytest.raises(ValueError, match=f"^{name}: expected a model whose numbers keep one order"):
                fit_table(NUMBERS, **QUICK | options | asked)


def gappy(n=400):
    """Three normal columns, each with gaps wherever one with fewer gaps has one; and a count that lacks nothing."""
    a = RNG.normal(size=n)
    table = {"c": a + RNG.normal(size=n), "b": a + 0.5 * RNG.normal(size=n), "a": a, "n": RNG.poisson(3, n) * 1.0}
    there = RNG.random(n)
    table["b"][there < 0.3] = np.nan
    table["c"][there < 0.6] = np.nan
    return table


def test_rows_with_gaps_are_learned_from():
    table = gappy(2000)
    # Where c is there, a is another: the rows that lack nothing tell the wrong mean of a.
    high = ~np.isnan(table["c"])
    for name in "abc":
        table[name] = table[name] + 4 * high
    flow, _ = fit_table(table, missing="marginal", max_steps=200, model_options={"blocks": 2, "hidden": (8, 8)})
    assert flow.schema.order == ["a", "n", "b", "c"]
    a = flow.draw(4000, generator=torch.Generator().manual_seed(0))["a"]
    assert a.mean() == pytest.approx(table["a"].mean(), abs=0.25)
    grid, cell = middles(-12, 16, 2001)
    assert np.exp(flow.score({"a": grid}, columns=["a"])).sum() * cell == pytest.approx(1, abs=1e-3)
    assert np.isfinite(flow.score(table)).all()
    with pytest.raises(ValueError, match=r"behind missing 'b' \(2 of 3 rows, first in row 12\).*Fill or drop"):
        flow.score({"a": [1, 1, 1.5], "n": [2, 2, 2], "b": [1, None, None], "c": [None, 1, 2]}, first_row=11)
    with pytest.raises(ValueError, match=r"behind missing 'n' \(1 of 1 rows"):
        flow.score({"a": [1.5], "n": [None], "b": [1.5], "c": [None]})
    # A whole column may lack, whatever its type then is; but not be absent.
    assert flow.score({"a": [1.5], "n": [2], "b": [None], "c": [None]}) == flow.score(
        {"a": [1.5], "n": [2]}, columns=["a", "n"]
    )
    with pytest.raises(ValueError, match="expected the columns 'c' too"):
        flow.score({"a": [1.5], "n": [2], "b": [None]})


def test_columns_of_every_kind_may_have_gaps():
    table = {
        "kind": ["u", "v", "u"] * 40,
        "n": RNG.poisson(3, 120) * 1.0,
        "share": RNG.uniform(0.1, 0.9, 120),
        "below": -RNG.exponential(size=120),
        "heavy": RNG.standard_t(1, 120) * 30,
    }
    for i, name in enumerate(["n", "share", "below", "heavy"]):
        table[name][: 20 * (i + 1)] = np.nan
    bounds = {"n": (0, None), "share": (0, 1), "below": (None, 0)}
    options = QUICK | {"max_steps": 20}
    flow, history = fit_table(table, missing="marginal", bounds=bounds, **options)
    assert flow.schema.order == ["kind", "n", "share", "below", "heavy"]
    assert flow.schema.numbers[3].heavy
    assert np.isfinite(history.loss).all()
    scores = flow.score(table)
    for i, names in enumerate([["kind"], ["kind", "n"], ["kind", "n", "share"], ["kind", "n", "share", "below"]]):
        rows = slice(20 * i, 20 * (i + 1))
        assert scores[rows] == pytest.approx(flow.score(table, columns=names)[rows], abs=1e-9)
    assert np.exp(flow.score(product(kind=["u", "v"], n=list(range(200))), columns=["kind", "n"])).sum() == (
        pytest.approx(1, abs=1e-2)
    )
    # What stands for the missing values is in the domain of every step: no gradient is NaN.
    rows = torch.as_tensor(flow.schema.encode(as_table(table), gaps=True).x)
    flow.zero_grad()
    flow.log_prob(rows).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in flow.parameters() if p.grad is not None)


def test_what_gaps_there_may_be():
    table = gappy()
    with pytest.raises(ValueError, match=r"'c' \(\d+ of 400.*'b' \(\d+ of 400.*or, for missing.*missing='marginal'"):
        fit_table(table, **QUICK)
    with pytest.raises(ValueError, match=r"of the model, 'c', 'a'.*behind missing 'c' \(\d+ of 400.*others first"):
        fit_table(table, missing="marginal", first=["c"], **QUICK)
    with pytest.raises(ValueError, match=r"'b' \(\d+ of 400 rows"):
        fit_table(table, missing="marginal", context=["b"], **QUICK)
    with pytest.raises(ValueError, match=r"no inf; got 'c' \(1 of 400 rows, first in row 3\)"):
        fit_table(table | {"c": np.where(np.arange(400) == 3, np.inf, table["c"])}, missing="marginal", **QUICK)
    with pytest.raises(ValueError, match="column 'z': expected values; all 400 are missing"):
        fit_table(table | {"z": np.full(400, np.nan)}, missing="marginal", **QUICK)
    with pytest.raises(ValueError, match="missing: expected one of 'error', 'marginal'; got 'mean'"):
        fit_table(table, missing="mean", **QUICK)
    with pytest.raises(ValueError, match="2 rows or more to start from in which nothing is missing; got 1 of"):
        fit_table({"a": RNG.normal(size=9), "b": [1.5, 2.5, *[None] * 7]}, missing="marginal", validation=0.2, **QUICK)
    # Constants and duplicates may have gaps; categories too, if nothing follows.
    more = table | {"same": table["b"].copy(), "one": np.where(np.isnan(table["b"]), None, "x")}
    with pytest.warns(UserWarning, match="dropped"):
        flow, _ = fit_table(more, missing="marginal", **QUICK)
    assert np.isfinite(flow.score(more)).all()
    kinds = ["u", "v", None, "u", None, "v"] * 5
    flow, _ = fit_table({"kind": kinds, "on": [True, False, True] * 10}, missing="marginal", **QUICK)
    assert flow.schema.order == ["on", "kind"]
    assert flow.score({"kind": [None], "on": [True]}) == flow.score({"on": [True]}, columns=["on"])


def test_as_an_estimator():
    X = np.stack(list(gappy(120).values()), 1)
    model = FlowDensity(missing="marginal", random_state=0, **QUICK).fit(X)
    assert model.schema_.order == ["x2", "x3", "x1", "x0"]
    assert model.score_samples(X).shape == (120,)
    assert set(model.predict(X)) == {1, -1}
    first = model.score_samples(X, columns=[2])
    assert (first == model.flow_.score({"x2": X[:, 2]}, columns=["x2"])).all()
    given = model.score_samples(X, columns=["x3", 1], given=[-2])
    assert np.isfinite(given).all()
    assert model.__sklearn_tags__().input_tags.allow_nan
    assert not FlowDensity().__sklearn_tags__().input_tags.allow_nan
    mixed = np.array([["u", "v", "v"] * 40, [None if v < 0.4 else v for v in RNG.random(120)]], dtype=object).T
    other = FlowDensity(missing="marginal", random_state=0, **QUICK).fit(mixed)
    assert (pickle.loads(pickle.dumps(other)).score_samples(mixed) == other.score_samples(mixed)).all()  # noqa: S301
    frame = pd.DataFrame({"kind": mixed[:, 0], "size": mixed[:, 1].astype(float)})
    framed = FlowDensity(missing="marginal", random_state=0, **QUICK).fit(frame)
    assert (framed.score_samples(frame) == other.score_samples(mixed)).all()
    ordered = FlowDensity(first=[2, 0], random_state=0, **QUICK).fit(X[~np.isnan(X).any(1)])
    assert ordered.schema_.order == ["x2", "x0", "x1", "x3"]
    draws = ordered.sample(4, context={2: [0.5], "x0": [1.0]})
    assert (draws[:, [2, 0]] == [0.5, 1.0]).all()
