"""Tables as they are in scikit-learn, and splits that are partitions."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import datasets

from quarflow.data.tabular import TABLES, load_table, split

SHAPES = {
    "iris": (150, 4),
    "wine": (178, 13),
    "breast_cancer": (569, 30),
    "diabetes": (442, 10),
    "digits": (1797, 64),
}
FRACTIONS = st.floats(0.06, 0.4)


@pytest.mark.parametrize("name", TABLES)
def test_table(name):
    table = load_table(name, torch.float64)
    assert table.x.shape == SHAPES[name]
    assert table.x.dtype == torch.float64
    assert table.x.isfinite().all()
    assert len(set(table.columns)) == table.x.shape[1]
    assert {type(column) for column in table.columns} == {str}
    assert table.target.shape == table.x.shape[:1]
    assert table.target.dtype == (torch.float64 if name == "diabetes" else torch.int64)
    assert load_table(name).x.dtype == torch.get_default_dtype()


def test_values_are_in_natural_units():
    wine = datasets.load_wine()
    table = load_table("wine", torch.float64)
    assert (table.x.numpy() == wine.data).all()
    assert (table.target.numpy() == wine.target).all()
    age = load_table("diabetes").x[:, 0]
    assert age.min() == 19
    assert age.max() == 79


def test_loading_leaves_scikit_learn_alone():
    table = load_table("iris", torch.float64)
    table.x.zero_()
    assert load_table("iris", torch.float64).x.sum() > 0


def test_unknown_table():
    with pytest.raises(ValueError, match=r"one of iris, wine.* got 'titanic'"):
        load_table("titanic")


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'quarflow\[sklearn\]'"):
        load_table("iris")


@given(rows=st.integers(10, 200), validation=FRACTIONS, test=FRACTIONS, seed=st.integers(0, 99))
def test_split_is_a_partition(rows, validation, test, seed):
    x = torch.arange(rows)
    parts = split(x, validation, test, seed)
    assert torch.equal(torch.cat(parts).sort().values, x)
    assert abs(len(parts[1]) - rows * validation) <= 0.5
    assert abs(len(parts[2]) - rows * test) <= 0.5
    for part, pair in zip(parts, split(torch.stack([x, -x], -1), validation, test, seed), strict=True):
        assert torch.equal(pair, torch.stack([part, -part], -1))


def test_split_depends_on_the_seed_alone():
    x = torch.arange(100)
    a, b = split(x, seed=1)[0], split(x, seed=2)[0]
    assert not torch.equal(a, b)
    torch.manual_seed(5)
    assert torch.equal(a, split(x, seed=1)[0])


def test_a_split_may_have_empty_parts_only_when_asked():
    train, validation, test = split(torch.zeros(3, 2), validation=0, test=0)
    assert train.shape == (3, 2)
    assert validation.shape == test.shape == (0, 2)


@pytest.mark.parametrize(
    ("x", "fractions", "message"),
    [
        (torch.zeros(10), {"validation": 1.0}, r"validation must be a fraction .* got 1.0"),
        (torch.zeros(10), {"test": -0.1}, r"test must be a fraction .* got -0.1"),
        (torch.zeros(10), {"validation": 0.5, "test": 0.5}, "no train rows of 10"),
        (torch.zeros(10), {"validation": 0.8, "test": 0.9}, "no train rows of 10"),
        (torch.zeros(4), {"validation": 0.5, "test": 0.1}, "no test rows of 4"),
        (torch.zeros(0), {}, "no train rows of 0"),
        (torch.tensor(1.0), {}, "x must have rows"),
    ],
)
def test_bad_splits(x, fractions, message):
    with pytest.raises(ValueError, match=message):
        split(x, **fractions)
