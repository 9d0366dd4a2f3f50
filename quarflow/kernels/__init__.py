"""Fast paths. Each lives in a file of the same stem as its readable reference, and has the reference's signature.

``QUARFLOW_KERNELS=0`` in the environment turns them off.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


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
