"""Fast paths. Each lives in a file of the same stem as its readable reference, and has the reference's signature.

``QUARFLOW_KERNELS=0`` in the environment turns them off.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether fast paths may run on ``x``: plain eager mode in the dtype of ``x``, and not turned off.

    Under `torch.compile` and `torch.func` the readable references run, which these can look into.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled(x.device.type)
        or torch.autograd.forward_ad._current_level >= 0
        or os.environ.get("QUARFLOW_KERNELS") == "0"
    )
