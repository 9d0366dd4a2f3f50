"""Masks as data: which unit may read which.

A unit has a *rank*: the index of the coordinate whose group it belongs to. A unit of rank ``r`` may read units of rank
``<= r``; that makes the Jacobian lower triangular, and the reads of equal rank are the ones its diagonal is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows and columns of a layer's diagonal blocks through which the diagonal of the Jacobian passes.
Live = tuple[slice, slice]
WHOLE: Live = (slice(None), slice(None))

# (r0, r1, c0, c1): rows r0:r1 of a layer read columns :c1, and columns c0:c1 are read from rows r0: on.
Panels = tuple[tuple[int, int, int, int], ...]

# The neighbours (dy, dx) that a 3x3 window reads, by the order of the coordinates: in "pixel" order, raster order with
# the channels of a pixel together, those before; in "channel" order, channel after channel, all.
_RASTER = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
TAPS = {"pixel": tuple(_RASTER[:5]), "channel": tuple(_RASTER)}
CENTRE = 4  # of the taps: those before it come earlier in a raster


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


def panels(mask: Tensor, least: int = 48) -> Panels:
    """The stairs below which a mask is not zero, each of at least so many rows and columns, as `Panels`.

    A product with the masked weight, panel by panel, leaves out what is zero: almost half of it if there are many.

    >>> panels(triangular_mask(ranks(4, 1), ranks(4, 2)), least=2)
    ((0, 4, 0, 2), (4, 8, 2, 4))
    """
    rows, columns = mask.shape
    reads = (mask != 0) * torch.arange(1, columns + 1)
    ends = reads.amax(1).cummax(0).values.tolist()
    found = [(0, 0, 0, 0)]
    for r in range(1, rows):
        _, r0, _, c0 = found[-1]
        end = ends[r - 1]
        if end < ends[r] and min(r - r0, end - c0, rows - r, columns - end) >= least:
            found.append((r0, r, c0, end))
    _, r0, _, c0 = found[-1]
    return (*found[1:], (r0, rows, c0, columns))


def window_mask(in_ranks: Tensor, out_ranks: Tensor, order: str) -> Tensor:
    """``mask[o, i, t]``: whether output ``o`` of a pixel may read input ``i`` of the neighbour ``TAPS[order][t]``.

    Ranks are channels. At the pixel itself a unit reads ranks up to its own. In "pixel" order it reads everything of
    the pixels before; in "channel" order its own channel of the pixels before, and lower channels everywhere.

    >>> window_mask(torch.arange(2), torch.arange(2), "pixel")[0].int()
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0]], dtype=torch.int32)
    >>> window_mask(torch.arange(2), torch.arange(2), "channel")[1].int()
    tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32)
    """
    here, below = triangular_mask(in_ranks, out_ranks), triangular_mask(in_ranks, out_ranks, strict=True)
    before = torch.ones_like(here) if order == "pixel" else here
    taps = len(TAPS[order])
    return torch.stack([before] * CENTRE + [here] + [below] * (taps - CENTRE - 1), dim=2)
