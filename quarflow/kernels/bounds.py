"""`quarflow.nn.bounds.gram_norm` with its gradient in closed form: a sixth of the kernels.

``B = tr(G^(2N))^(1/4N)`` with ``G = W^T W`` has the gradient ``B^(1-4N) W G^(2N-1)``; ``G^(2N-1)`` is the product of
the squares ``G, G^2, G^4 .. G^N`` that the forward pass makes. ``B`` is homogeneous of degree one, ``<dB/dW, W> = B``:
so the factor in front, where powers would overflow, follows from the direction alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gram_norm(weight: Tensor, slack: float = 0.01) -> Tensor:
    """As `quarflow.nn.bounds.gram_norm`, for matrices of a rank above one."""
    return _GramNorm.apply(weight, slack)


class _GramNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, slack: float) -> Tensor:
        from quarflow.nn.bounds import gram_powers

        bound, powers = gram_powers(weight, slack)
        ctx.slack = slack
        ctx.save_for_backward(weight, bound, *powers)
        return bound

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        from quarflow.nn.bounds import gram_powers

        weight, bound, *powers = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: as autograd makes them from the reference
            return torch.autograd.grad(gram_powers(weight, ctx.slack)[0], weight, gradient, create_graph=True)[0], None
        wide = weight.shape[-2] < weight.shape[-1]
        direction = weight.mT if wide else weight
        for power in powers:
            direction = direction @ power
        direction = direction.mT if wide else direction
        along = (direction * weight).sum((-2, -1)).clamp_min(torch.finfo(weight.dtype).tiny)
        return direction * (gradient * bound / along)[..., None, None], None
