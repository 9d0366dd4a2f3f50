"""Inverses by numbers: the root of an increasing, triangular map, and the gradient through it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quarflow.solvers import NotConverged, Solution, default_tolerance

Map = Callable[[Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def solve_increasing(f: Map, z: Tensor, low: Tensor, high: Tensor, name: str) -> Tensor:
    """The root of ``f(x) = z`` in ``[low, high]``, for a lower triangular ``f`` with ``df_i/dx_i > 0``.

    ``f(x)`` gives its value and the slopes ``df_i/dx_i``. All coordinates take Newton steps at once and fall into
    place in order; the first that is not settled has a bracket, which the sign of its residual narrows, and whose
    midpoint replaces a Newton step that leaves it or did not halve the residual. So each ends after a bounded number
    of steps, whatever the slopes are. Raises `NotConverged` unless, in every row and coordinate,

        |f_i(x) - z_i| <= 32 eps max(1, |f_i|, |z_i|, f_i' max(1, |x_i|)),

    what rounding in ``x``, ``z`` and ``f`` is worth.

    Shapes: (batch, D); ``low`` and ``high`` likewise, and valid whatever the other coordinates are.

    >>> cube = lambda x: (x**3, 3 * x**2)
    >>> x = solve_increasing(cube, torch.tensor([[8.0]]), torch.zeros(1, 1), torch.full((1, 1), 9.0), "cube")
    >>> torch.allclose(x, torch.tensor(2.0))
    True
    """
    tolerance = default_tolerance(z.dtype)
    # A root that sits on the edge is inside, whatever way it was rounded.
    margin = 0.01 * (high - low) + 8 * tolerance * z.abs().clamp_min(1)
    low, high = low - margin, high + margin
    limit = 20 + 140 * z.shape[1]  # Newton, or a halving at every second step
    position = torch.arange(z.shape[1], device=z.device)
    x = torch.minimum(torch.maximum(z, low), high)
    last = torch.full_like(z, torch.inf)
    for step in range(1, limit + 1):
        value, slope = f(x)
        r = value - z
        scale = torch.maximum(torch.maximum(value.abs(), z.abs()), slope * x.abs().clamp_min(1)).clamp_min(1)
        met = r.abs() <= tolerance * scale
        if step == limit or bool((met | ~torch.isfinite(r)).all()):
            break
        first = met.int().cumprod(1).sum(1, keepdim=True)
        here = position == first
        low, high = torch.where(here & (r < 0), x, low), torch.where(here & (r > 0), x, high)
        new = x - r / slope
        slow = here & (r.abs() > 0.5 * last)
        last = torch.where(here, r.abs(), last)
        new = torch.where(slow | ~((new > low) & (new < high)), 0.5 * low + 0.5 * high, new)
        x = torch.where(position >= first, new, x)
    solution = Solution(x, step, r.abs().amax(1), met.all(1), slope, tolerance)
    if not bool(solution.converged.all()):
        finite = bool(torch.isfinite(solution.residual).all())
        raise NotConverged(
            f"the inverse of {name} did not reach its tolerance of {tolerance:.1e} in "
            f"{int((~solution.converged).sum())} of {len(z)} rows: after {step} steps the largest |f(x) - z| "
            f"is {solution.residual.max().item():.1e}. "
            + ("Use float64 (flow.double())." if finite else "Look for NaN or inf in the weights and in z."),
            solution,
        )
    return x


def follow(x: Tensor, residual: Tensor, jacobian: Tensor) -> Tensor:
    """``x`` with the gradient of the exact inverse: a Newton step of length zero, its Jacobian held constant.

    ``residual = f(x) - z`` depends on ``z``, the parameters and the context through autograd, and not on ``x``. By
    the implicit function theorem ``dx = -J^{-1} d(residual)``. First derivatives only.

    Shapes: ``x`` and ``residual`` (batch, D), ``jacobian`` (batch or 1, D, D) lower triangular.

    >>> z = torch.tensor([[8.0]], requires_grad=True)
    >>> x = torch.tensor([[2.0]])
    >>> torch.autograd.grad(follow(x, x**3 - z, torch.tensor([[[12.0]]])).sum(), z)[0].item()  # 1 / (3 x^2)
    0.0833...
    """
    zero = (residual - residual.detach())[..., None]
    return x - torch.linalg.solve_triangular(jacobian.detach(), zero, upper=False)[..., 0]
