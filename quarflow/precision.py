"""In which precision the matrix products of networks run; everything else of a flow keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quarflow.checks import check_choice

PRECISIONS = ("full", "tf32", "bf16")


@contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Within it, the networks of flows on ``device`` run in this precision:

    ========  ===========================================================================================
    "full"    the dtype of the flow
    "tf32"    float32 whose products on a GPU round their factors to 11 bits, and add up in float32
    "bf16"    hidden values of 8 bits, added up in float32; what goes from block to block, bounds and
              log-determinants stay as they are. Flows in float64 are not changed
    ========  ===========================================================================================

    The backward pass belongs outside for "bf16", as with any autocast.

    >>> with products("bf16", torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    check_choice("precision", precision, PRECISIONS)
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
        return
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # torch's default for convolutions is True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
