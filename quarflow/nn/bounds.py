"""Bounds of the slopes and norms of a network, from its weights.

What is bounded, for a network ``F`` with layers ``W_1 .. W_L``, activations with slopes in [-1, 1], and diagonal blocks
``W_l[i,i]`` (docs/mathematics.md, "The bound"):

==============  ====================================  ===========================================================
``lipschitz=``  quantity                              scale of row i of ``F``
==============  ====================================  ===========================================================
"network"       ``||dF/dx||_2 <= sigma``              ``sigma / (theta_i + B)``, ``B >= prod_l ||W_l||_2``
"diagonal"      ``max_i |d_i| <= sigma``              ``sigma / (theta_i + max_j B_j)``, the maximum of norms
                                                      taken in each layer
"coordinate"    ``|d_i| <= sigma`` for each i         ``sigma / (theta_i + B_i)``
==============  ====================================  ===========================================================

and how ``B_i`` comes from the diagonal blocks (``bound=``):

==========  =========  ==================================================================================
"paths"     certified  ``|W_L[i,i]| ... |W_1[i,i]|``, absolute values of the entries: every path through
                       the network at its steepest. No iteration, and tighter than norms for narrow blocks
"gram"      certified  the product of `gram_norm` of the blocks
"power"     estimate   the product of `power_norm` of the blocks, the paper's; "gram" in evaluation
==========  =========  ==================================================================================

A spectral norm is what a contraction needs: ``lipschitz="network"`` takes "gram" or "power".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quarflow.kernels import bounds as fast
from quarflow.kernels import usable

LIPSCHITZ = ("network", "diagonal", "coordinate")
BOUNDS = ("paths", "gram", "power")


def safety(matrices: Sequence[Tensor]) -> float:
    """Factor that keeps an upper bound of a product of matrices one after rounding.

    >>> 1 < safety([torch.zeros(3, 5)]) < 1 + 1e-5
    True
    """
    terms = sum(max(m.shape[-2:]) for m in matrices)
    return 1 + 8 * terms * torch.finfo(matrices[0].dtype).eps


def floor(x: Tensor) -> float:
    """What bounds are kept above, so that a scale ``sigma / bound`` of all-zero weights is finite.

    >>> 0 < floor(torch.zeros(1)) < 1e-18
    True
    """
    return torch.finfo(x.dtype).tiny ** 0.5


def path_bound(blocks: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Certified bound of the slopes of stacked one-dimensional networks, ``|W_L| ... |W_1|``, all at their steepest.

    ``d = W_L diag(phi') W_{L-1} ... W_1`` is a sum over paths of products of entries and slopes, and every slope is
    in [-1, 1]. Behind a concatenated activation (``width`` 2) the slopes of the two copies of a unit have a norm of at
    most one, and so count as one path with the norm of their two weights.

    Shapes: blocks (features, out, in) from the first layer to the last, the last with one output -> (features,).

    >>> path_bound([torch.full((1, 2, 1), -1.0), torch.full((1, 1, 2), 3.0)], [1]).item() >= 6.0
    True
    """
    paths = blocks[0].abs()
    for block, width in zip(blocks[1:], widths, strict=True):
        if width > 1:
            copies = block.unflatten(2, (width, -1))
            paths = (copies.square().sum(2) + torch.finfo(block.dtype).tiny).sqrt() @ paths
        else:
            paths = block.abs() @ paths
    return paths.flatten() * safety(blocks)


def gram_norm(weight: Tensor, slack: float = 0.01) -> Tensor:
    """Certified upper bound of the spectral norm, within a factor ``1 + slack``; differentiable, no state.

    With ``G = W^T W``: ``||W||_2 <= ||G^(2^t)||_F^(1/2^(t+1)) <= rank^(1/2^(t+2)) ||W||_2``; the number ``t`` of
    squarings follows from ``slack``.

    Shapes: (..., m, n) -> (...).

    >>> gram_norm(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).item() >= 1.0
    True
    """
    if min(weight.shape[-2:]) == 1:
        return (weight.square().sum((-2, -1)) + torch.finfo(weight.dtype).tiny).sqrt() * safety([weight])
    return fast.gram_norm(weight, slack) if usable(weight) else gram_powers(weight, slack)[0]


def gram_powers(weight: Tensor, slack: float) -> tuple[Tensor, list[Tensor]]:
    """`gram_norm` of matrices of a rank above one, and ``G, G^2, G^4 ..`` up to the last square, each up to a factor.

    >>> [p.shape for p in gram_powers(torch.ones(2, 3), slack=0.5)[1]]
    [torch.Size([2, 2])]
    """
    rank = min(weight.shape[-2:])
    tiny = torch.finfo(weight.dtype).tiny
    # The largest entry goes first, so that squares neither overflow nor vanish.
    peak = weight.detach().abs().amax((-2, -1)).clamp_min(tiny)
    power = weight / peak[..., None, None]
    power = power @ power.mT if weight.shape[-2] < weight.shape[-1] else power.mT @ power
    powers = []
    squarings = max(0, math.ceil(math.log2(math.log(rank) / math.log1p(slack)) - 2))
    log_norm = torch.zeros_like(peak)
    for t in range(squarings):
        if t % 2 == 0:
            # Rescaled by its trace, the largest eigenvalue is at least 1/rank, so two squarings cannot underflow.
            # A scale is divided out and multiplied back: it needs no gradient.
            trace = power.detach().diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(tiny)
            power = power / trace[..., None, None]
            log_norm = log_norm + trace.log() / 2 ** (t + 1)
        powers.append(power)
        power = power @ power
    powers.append(power)
    log_norm = log_norm + (power.square().sum((-2, -1)) + tiny).log() / 2 ** (squarings + 2)
    return peak * log_norm.exp() * safety([weight]), powers


def power_norm(weight: Tensor, tolerance: float = 1e-3, max_steps: int = 200) -> Tensor:
    """Spectral norm by power iteration, from below: an estimate, not a bound (the paper's way).

    Starts from fresh noise at every call, so it cannot stay with a vector that yesterday's weights left it; stops when
    no norm of the batch grows by more than ``tolerance`` relatively. The gradient is that of ``u^T W v``.

    Shapes: (..., m, n) -> (...).

    >>> torch.allclose(power_norm(torch.diag(torch.tensor([2.0, 3.0]))), torch.tensor(3.0), rtol=1e-2)
    True
    """
    with torch.no_grad():
        v = torch.randn_like(weight[..., :1, :]).mT
        norm = weight.new_zeros(weight.shape[:-2])
        for _ in range(max_steps):
            u = weight @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(1e-30))
            before, norm = norm, torch.linalg.vector_norm(u, dim=(-2, -1))
            v = weight.mT @ u
            if bool((norm - before <= tolerance * norm).all()):
                break
        u = u / torch.linalg.vector_norm(u, dim=-2, keepdim=True).clamp_min(1e-30)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(1e-30)
    return (u.mT @ weight @ v)[..., 0, 0]
