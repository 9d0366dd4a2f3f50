"""Checks at the public boundary: what was expected, what came, and what to do about it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def check_count(name: str, value: object, least: int = 1) -> None:
    """``value`` must be an integer of at least ``least``.

    >>> check_count("features", 0)
    Traceback (most recent call last):
    ValueError: features: expected an integer >= 1; got 0.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name}: expected an integer >= {least}; got {value!r}.")


def check_layers(name: str, value: object, example: tuple[int, ...], least: int = 1) -> None:
    """``value`` must be a sequence of units, one number for each of ``least`` layers or more.

    >>> check_layers("hidden", 64, (64, 64))
    Traceback (most recent call last):
    ValueError: hidden: expected units of each hidden layer, such as (64, 64); got 64.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < least:
        raise ValueError(f"{name}: expected units of each hidden layer, such as {example}; got {value!r}.")
    for units in value:
        check_count(name, units)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """``value`` must be one of ``choices``.

    >>> check_choice("mixing", "random", ("lu", None))
    Traceback (most recent call last):
    ValueError: mixing: expected one of 'lu', None; got 'random'.
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_sigma(value: object) -> None:
    """The Lipschitz bound must be a number in [0, 1).

    >>> check_sigma(1.0)
    Traceback (most recent call last):
    ValueError: sigma: expected a number in [0, 1), below 1 so that the flow is invertible; got 1.0.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= float(value) < 1:
        raise ValueError(f"sigma: expected a number in [0, 1), below 1 so that the flow is invertible; got {value!r}.")


def check_positive(name: str, value: object) -> None:
    """``value`` must be a finite number above zero.

    >>> check_positive("learning_rate", -1.0)
    Traceback (most recent call last):
    ValueError: learning_rate: expected a finite number > 0; got -1.0.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}: expected a finite number > 0; got {value!r}.")


def is_traced(x: Tensor) -> bool:
    """Whether values cannot be looked at now: inside `torch.compile`, `torch.func` transforms or graph capture.

    >>> is_traced(torch.zeros(1)), torch.func.vmap(lambda x: x + is_traced(x))(torch.zeros(1))
    (False, tensor([1.]))
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_tensor(name: str, x: object, event_shape: tuple[int, ...], like: Tensor, gaps: bool = False) -> None:
    """``x`` must be a finite floating tensor (..., *event_shape), with the dtype and device of ``like``.

    With ``gaps`` it may hold NaN, for values that are missing.

    >>> check_tensor("x", torch.zeros(4, 3), (2,), torch.zeros(1))
    Traceback (most recent call last):
    ValueError: x: expected shape (..., 2); got (4, 3).
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor; got {type(x).__name__}. Use torch.as_tensor({name}).")
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected a floating dtype; got {x.dtype}. Use {name}.to({like.dtype}).")
    wanted = f"(..., {', '.join(map(str, event_shape))})"
    if x.ndim <= len(event_shape) or tuple(x.shape[x.ndim - len(event_shape) :]) != tuple(event_shape):
        hint = f" Use {name}[None] for a batch of one." if tuple(x.shape) == tuple(event_shape) else ""
        raise ValueError(f"{name}: expected shape {wanted}; got {tuple(x.shape)}.{hint}")
    if x.numel() == 0:
        raise ValueError(f"{name}: expected at least one row; got an empty batch of shape {tuple(x.shape)}.")
    if x.dtype != like.dtype:
        raise ValueError(
            f"{name}: expected {like.dtype}, the dtype of the flow; got {x.dtype}. "
            f"Use {name}.to({like.dtype}), or change the flow with flow.to({x.dtype})."
        )
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, that of the flow; got {x.device}. Use .to(device).")
    check_finite(name, torch.where(x.isnan(), 0, x) if gaps else x, len(event_shape))


def check_finite(name: str, x: Tensor, event_dims: int = 1) -> None:
    """No NaN and no inf; the error says in how many rows, and in which columns.

    >>> check_finite("x", torch.tensor([[0.0, float("nan")]]))
    Traceback (most recent call last):
    ValueError: x: expected finite values; got NaN or inf in 1 of 1 rows, columns [1]. Drop or fill these rows.
    """
    if is_traced(x) or bool(torch.isfinite(x).all()):
        return
    bad = ~torch.isfinite(x).flatten(x.ndim - event_dims).reshape(-1, x.shape[x.ndim - event_dims :].numel())
    columns = bad.any(0).nonzero().flatten().tolist()
    shown = f"{columns[:10]}{' and more' if len(columns) > 10 else ''}"
    raise ValueError(
        f"{name}: expected finite values; got NaN or inf in {int(bad.any(1).sum())} of {len(bad)} rows, "
        f"columns {shown}. Drop or fill these rows."
    )


def check_context(context: object, features: int, like: Tensor) -> None:
    """Context must be there when the flow has context features, and must not when it has none.

    >>> check_context(None, 2, torch.zeros(1))
    Traceback (most recent call last):
    ValueError: context: this flow is conditional on 2 features; got none. Pass context of shape (..., 2).
    """
    if features == 0:
        if context is not None:
            raise ValueError("context: this flow has no context (context=0); got some. Leave it out.")
        return
    if context is None:
        raise ValueError(
            f"context: this flow is conditional on {features} features; got none. "
            f"Pass context of shape (..., {features})."
        )
    check_tensor("context", context, (features,), like)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is that of a device or host whose memory is full.

    >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        # What torch's allocator of host memory raises has no class of its own.
        isinstance(error, RuntimeError)
        and any(text in str(error) for text in ("can't allocate memory", "not enough memory"))
    )
