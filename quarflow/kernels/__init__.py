"""Fast paths. Each lives in a file of the same stem as its readable reference, and has the reference's signature.

``QUARFLOW_KERNELS=0`` in the environment turns them off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton


def usable(x: Tensor) -> bool:
    """Whether fast paths may run on ``x``: plain eager mode, and not turned off.

    Under `torch.compile` and `torch.func` the readable references run, which these can look into.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or os.environ.get("QUARFLOW_KERNELS") == "0"
    )


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


def fuses(x: Tensor, numel: int) -> bool:
    """On a GPU, where there are so many hidden values that passes over memory are what costs."""
    return x.is_cuda and numel >= 2**20 and has_triton()


def fused(function: Callable[..., Any], name: str, dynamic: bool = True) -> Callable[..., Any]:
    """``function``, which nothing else has made, compiled: each value is read and written once."""
    # The compiler counts the variants (dtypes, layouts) of what has one code object, and gives up above a few.
    code = function.__code__.replace(co_name=name)
    kept = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return torch.compile(kept, dynamic=dynamic)
