"""Small real tables that scikit-learn carries with it (nothing is downloaded), and a split of rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TABLES = ("iris", "wine", "breast_cancer", "diabetes", "digits")


class Table(NamedTuple):
    """``x`` ``(rows, columns)``, the columns' names, and ``target`` ``(rows,)``: a class (int64) or a number.

    >>> load_table("wine").columns[:2]
    ('alcohol', 'malic_acid')
    """

    x: Tensor
    columns: tuple[str, ...]
    target: Tensor


def load_table(name: str, dtype: torch.dtype | None = None) -> Table:
    """A table in its natural units, in ``dtype`` (torch's default if none is given).

    ``digits`` holds the integers 0 to 16 and has constant columns; the others are measurements, some of few
    distinct values. Needs scikit-learn: ``pip install 'quarflow[sklearn]'``.

    >>> load_table("iris").x.shape
    torch.Size([150, 4])
    """
    if name not in TABLES:
        raise ValueError(f"name must be one of {', '.join(TABLES)}; got {name!r}")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("load_table needs scikit-learn: pip install 'quarflow[sklearn]'") from error
    # scikit-learn standardises diabetes, and only diabetes, unless told not to.
    options = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(datasets, f"load_{name}")(**options)
    dtype = dtype or torch.get_default_dtype()
    target = torch.as_tensor(bunch.target)
    return Table(
        x=torch.as_tensor(bunch.data, dtype=dtype),
        columns=tuple(str(column) for column in bunch.feature_names),
        target=target.to(dtype) if target.is_floating_point() else target,
    )


def split(
    x: Tensor, validation: float = 0.1, test: float = 0.1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ``x`` in random order, cut into (train, validation, test); the two fractions are of all rows.

    The same seed and number of rows give the same rows: split a table and its target one after the other.

    >>> train, validation, test = split(torch.arange(10.0), validation=0.2, test=0.3)
    >>> len(train), len(validation), len(test)
    (5, 2, 3)
    """
    for name, fraction in (("validation", validation), ("test", test)):
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} must be a fraction of the rows in [0, 1); got {fraction!r}")
    if x.ndim == 0:
        raise ValueError("x must have rows; got a tensor without dimensions")
    rows = len(x)
    held_out = [math.floor(rows * fraction + 0.5) for fraction in (validation, test)]
    sizes = [rows - sum(held_out), *held_out]
    for name, size, wanted in zip(("train", "validation", "test"), sizes, (1, validation, test), strict=True):
        if wanted and size < 1:
            raise ValueError(
                f"validation={validation!r} and test={test!r} leave no {name} rows of {rows}: "
                "change the fractions or give more rows"
            )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    train, validation_rows, test_rows = (x[index.to(x.device)] for index in order.split(sizes))
    return train, validation_rows, test_rows
