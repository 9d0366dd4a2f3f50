"""How good a density is: the mean log-likelihood of data that it has not seen, with its standard error."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quarflow.checks import check_context, check_count, check_tensor
from quarflow.pixels import check_images, dequantise

if TYPE_CHECKING:
    from quarflow.flow import Flow


@dataclass(frozen=True)
class Evaluation:
    """Mean log-likelihood of ``n`` rows in nats, and its standard error: ``std(log p) / sqrt(n)``.

    >>> print(Evaluation(nats=-1.44912, standard_error=0.01234, n=1000))
    -1.449 ± 0.012 nats (1000 rows)
    """

    nats: float
    standard_error: float
    n: int

    def __str__(self) -> str:
        return f"{self.nats:.3f} ± {self.standard_error:.3f} nats ({self.n} row{'s' * (self.n != 1)})"


def evaluate(flow: Flow, x: object, context: object = None, batch_size: int | None = None) -> Evaluation:
    """Mean ``log_prob`` of the rows of ``x``, a tensor or array (n, *event); in batches, without gradients.

    uint8 images get uniform noise first, always the same. See `quarflow.bits_per_dim` for their usual unit.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=2, hidden=(4,))
    >>> evaluate(flow, torch.randn(100, 2)).n
    100
    """
    x, context = as_data(flow, x, context)
    if batch_size is None:
        batch_size = rows_at_once(x)
    check_count("batch_size", batch_size)
    training = flow.training
    flow.eval()
    noise = torch.Generator(x.device).manual_seed(0)
    try:
        with torch.no_grad():
            parts = []
            for i in range(0, len(x), batch_size):
                rows = x[i : i + batch_size]
                values = dequantise(rows, flow.base.anchor, noise) if rows.dtype == torch.uint8 else rows
                parts.append(flow.log_prob(values, None if context is None else context[i : i + batch_size]))
    finally:
        flow.train(training)
    log_prob = torch.cat(parts).double()
    error = log_prob.std().item() / len(x) ** 0.5 if len(x) > 1 else float("nan")
    return Evaluation(log_prob.mean().item(), error, len(x))


def rows_at_once(x: Tensor, elements: int = 2**18) -> int:
    """Rows of a batch without gradients: wide enough to be fast, and bounded in memory for wide rows.

    >>> rows_at_once(torch.empty(0, 2)), rows_at_once(torch.empty(0, 3, 32, 32))
    (2048, 85)
    """
    # On a CPU what hidden values take must stay with the process: larger blocks come anew from the system each time.
    most = 2048 if x.device.type == "cpu" else 4096
    return max(1, min(most, elements // max(1, prod(x.shape[1:]))))


def as_data(
    flow: Flow, x: object, context: object = None, *, gaps: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """``x`` (n, *event) and ``context`` (n, features), checked, with the dtype and device of ``flow``.

    ``gaps`` says whether ``x`` may hold NaN, for missing values; None: whether ``flow`` takes them.

    >>> import quarflow as qf
    >>> as_data(qf.models.quar(features=2, blocks=1, hidden=(4,)), [[1.0, 2.0]])
    (tensor([[1., 2.]]), None)
    """
    like = flow.base.anchor
    rows = as_tensor("x", x)
    if rows.dtype == torch.uint8 and len(flow.event_shape) == 3:
        check_images(flow, rows)
        rows = rows.to(like.device)
    else:
        rows = as_rows("x", rows, tuple(flow.event_shape), like, flow.gaps if gaps is None else gaps)
    if context is None or flow.context_features == 0:
        check_context(context, flow.context_features, like)
        return rows, None
    conditions = as_rows("context", context, (flow.context_features,), like)
    if len(conditions) != len(rows):
        raise ValueError(f"context: expected {len(rows)} rows, one for each row of x; got {len(conditions)}.")
    return rows, conditions


def as_rows(name: str, data: object, event_shape: tuple[int, ...], like: Tensor, gaps: bool = False) -> Tensor:
    """A tensor or array as a finite floating tensor (n, *event_shape) with the dtype and device of ``like``.

    With ``gaps`` it may hold NaN, for values that are missing.

    >>> as_rows("x", [[1, 2]], (2,), torch.zeros(1))
    Traceback (most recent call last):
    ValueError: x: expected a floating dtype; got torch.int64. Use x.to(torch.float32).
    """
    data = as_tensor(name, data)
    if data.is_floating_point():
        data = data.detach().to(like.device, like.dtype)
    check_tensor(name, data, event_shape, like, gaps)
    if data.ndim != 1 + len(event_shape):
        raise ValueError(
            f"{name}: expected shape (n, {', '.join(map(str, event_shape))}); got {tuple(data.shape)}. "
            f"Use {name}.reshape{(-1, *event_shape)}."
        )
    return data


def as_tensor(name: str, data: object) -> Tensor:
    """A tensor as it is; anything else by way of a numpy array.

    >>> as_tensor("x", [[1.0, 2.0]])
    tensor([[1., 2.]], dtype=torch.float64)
    """
    if isinstance(data, Tensor):
        return data
    import numpy as np

    try:
        array = np.array(data, order="C")  # a copy: tensors cannot stand on read-only or reversed memory
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected a tensor or an array of numbers; got {type(data).__name__} ({error}). "
            "Turn text and categories into numbers first."
        ) from error
