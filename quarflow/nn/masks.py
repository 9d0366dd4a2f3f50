"""Masks as data: which unit may read which.

A unit has a *rank*: the index of the coordinate whose group it belongs to. A unit of rank ``r`` may read units of rank
``<= r``; that makes the Jacobian lower triangular, and the reads of equal rank are the ones its diagonal is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(features: int, units: int) -> Tensor:
    """Rank of every unit of a layer that gives ``units`` units to each of ``features`` coordinates.

    >>> ranks(3, 2)
    tensor([0, 0, 1, 1, 2, 2])
    """
    return torch.arange(features).repeat_interleave(units)


def triangular_mask(in_ranks: Tensor, out_ranks: Tensor, strict: bool = False) -> Tensor:
    """``mask[o, i]``: whether output ``o`` may read input ``i``, ``in_ranks[i] <= out_ranks[o]`` (``<`` if strict).

    >>> triangular_mask(ranks(2, 1), ranks(2, 2)).int()
    tensor([[1, 0],
            [1, 0],
            [1, 1],
            [1, 1]], dtype=torch.int32)
    """
    read, write = in_ranks[None, :], out_ranks[:, None]
    return read < write if strict else read <= write
