"""Fast paths. Each lives in a file of the same stem as its readable reference, and has the reference's signature.

``QUARFLOW_KERNELS=0`` in the environment turns them off. `forms` tells which ones ran, and why no other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

MANY = 2**20  # hidden values, from which on passes over memory are what costs
_seen: Counter[str] | None = None


@contextmanager
def forms() -> Iterator[Counter[str]]:
    """Counts, within it, in which form the triangular networks ran, with the reason.

    "Triton" are the kernels for a GPU, "general" is torch with a backward pass written out, "reference" the readable
    one. A replayed CUDA graph counts nothing: it has what ran when it was captured.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=3, hidden=(4,))
    >>> with forms() as seen:
    ...     _ = flow.log_prob(torch.zeros(1, 2))
    >>> dict(seen)
    {'layers: general (not on a GPU)': 3}
    """
    global _seen
    before, _seen = _seen, Counter()
    try:
        yield _seen
    finally:
        _seen = before


def ran(part: str, form: str, why: str = "") -> None:
    """Tells `forms` what runs now."""
    if _seen is not None:
        _seen[f"{part}: {form}{why and f' ({why})'}"] += 1


def turned_off() -> str:
    """Why no fast path may run, whatever the tensors are; empty if they may.

    Under `torch.compile` and `torch.func` the readable references run, which these can look into.
    """
    if torch.compiler.is_compiling():
        return "under torch.compile"
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "under torch.func"
    return "QUARFLOW_KERNELS=0" if os.environ.get("QUARFLOW_KERNELS") == "0" else ""


def usable(x: Tensor) -> bool:
    """Whether fast paths may run on ``x``: plain eager mode, and not turned off."""
    return not turned_off()


def products_dtype(x: Tensor) -> torch.dtype:
    """In which dtype matrix products of tensors like ``x`` run: its own, or that of `torch.autocast`.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     products_dtype(torch.zeros(1)), products_dtype(torch.zeros(1).double())
    (torch.bfloat16, torch.float64)
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def without_triton(x: Tensor, numel: int) -> str:
    """Why the kernels for a GPU do not run where there are ``numel`` hidden values; empty if they do.

    >>> without_triton(torch.zeros(1), 10)
    'not on a GPU'
    """
    if not x.is_cuda:
        return "not on a GPU"
    if numel < MANY:
        return f"fewer than {MANY} hidden values"
    return "" if has_triton() else "no Triton here"


def fuses(x: Tensor, numel: int) -> bool:
    """On a GPU, where there are so many hidden values that passes over memory are what costs."""
    return not without_triton(x, numel)


def fused(function: Callable[..., Any], name: str, dynamic: bool = True) -> Callable[..., Any]:
    """``function``, which nothing else has made, compiled: each value is read and written once."""
    # The compiler counts the variants (dtypes, layouts) of what has one code object, and gives up above a few.
    code = function.__code__.replace(co_name=name)
    kept = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return torch.compile(kept, dynamic=dynamic)
