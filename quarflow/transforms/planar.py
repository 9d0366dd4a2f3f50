"""Planar, radial and Sylvester flows: the identity plus a map of low rank.

Their papers define them for variational inference, from noise to a sample. Here, as everywhere, the closed form is
data to noise, ``z = f(x)``. The inverse of a radial step is a quadratic equation; that of the others a triangular
system of scalar equations in a few variables, each increasing, solved by `quarflow.solvers.solve_increasing`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, softplus

from quarflow.checks import check_count
from quarflow.nn.masked import soft_clip
from quarflow.nn.triangular import without_autocast
from quarflow.solvers import conditioned, follow, solve_increasing
from quarflow.transforms.base import Transform

# Slopes stay above this. The papers' bound is 0, at which there is no inverse and which rounding does reach.
LEAST_SLOPE = 0.01


def above_minus_one(v: Tensor) -> Tensor:
    """``softplus(v + b) - 1 + LEAST_SLOPE``, above ``-1 + LEAST_SLOPE``, with ``b`` such that 0 goes to 0.

    >>> above_minus_one(torch.tensor([-1e9, 0.0]))
    tensor([-0.9900,  0.0000])
    """
    gap = 1 - LEAST_SLOPE
    return softplus(v + math.log(math.expm1(gap))) - gap


class ContextParameters(nn.Module):
    """``theta(c) = theta + C c``, cut into pieces: (batch or 1, size) each; ``C`` starts at zero.

    >>> a, b = ContextParameters([torch.ones(2), torch.zeros(1)], context=3)(torch.zeros(5, 3))
    >>> a.shape, b.shape
    (torch.Size([5, 2]), torch.Size([5, 1]))
    """

    def __init__(self, start: list[Tensor], context: int) -> None:
        super().__init__()
        check_count("context", context, least=0)
        self.sizes = [len(piece) for piece in start]
        self.theta = nn.Parameter(torch.cat(start))
        self.context = nn.Parameter(torch.zeros(len(self.theta), context)) if context else None

    def forward(self, context: Tensor | None) -> tuple[Tensor, ...]:
        theta = self.theta[None]
        if self.context is not None and context is not None:
            theta = theta + linear(context, self.context)
        return theta.split(self.sizes, 1)

    def extra_repr(self) -> str:
        return f"{sum(self.sizes)}" + ("" if self.context is None else f", context={self.context.shape[1]}")


def tanh_shift(y: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``R tanh(S y + b)`` and the slopes of tanh; ``R`` and ``S`` (batch or 1, M, M), others (batch or 1, M)."""
    h = torch.tanh((right @ y[..., None])[..., 0] + bias)
    return (left @ h[..., None])[..., 0], 1 - h * h


def tanh_root(t: Tensor, left: Tensor, right: Tensor, bias: Tensor, name: str) -> Tensor:
    """The root of ``y + R tanh(S y + b) = t``, for lower triangular ``R`` and ``S`` with ``R_ii S_ii > -1``.

    Equation ``i`` increases in ``y_i``, and ``|y_i - t_i| <= sum_j |R_ij|``.

    Shapes: ``t`` (batch, M), ``R`` and ``S`` (batch or 1, M, M), ``b`` (batch or 1, M) -> (batch, M).
    """
    product = left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)

    def f(y: Tensor) -> tuple[Tensor, Tensor]:
        shift, slope = tanh_shift(y, left, right, bias)
        return y + shift, 1 + product * slope

    reach = left.abs().sum(2)
    y = solve_increasing(f, t, t - reach, t + reach, name)
    if not torch.is_grad_enabled():
        return y
    shift, slope = tanh_shift(y, left, right, bias)
    jacobian = torch.eye(t.shape[1], dtype=t.dtype, device=t.device) + left * slope[:, None] @ right
    return follow(y, y + shift - t, jacobian)


class Planar(Transform):
    """``z = x + u tanh(w.x + b)``, ``ladj = log(1 + w.u tanh'(w.x + b))`` (Rezende & Mohamed 2015).

    As in the appendix of arXiv:1505.05770 ``u`` is moved along ``w`` such that ``w.u`` is above -1 (here by
    `LEAST_SLOPE`): f is invertible whatever the weights are. The inverse is one scalar equation, for ``w.x``.

    Shapes: (batch, features) -> (batch, features).

    >>> step = Planar(3)
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(step.inverse(step(x)[0])[0], x, atol=1e-4))
    True
    """

    def __init__(self, features: int, context: int = 0) -> None:
        super().__init__()
        check_count("features", features)
        w = torch.randn(features) / features**0.5
        self.parameters_at = ContextParameters([w, 0.1 * torch.randn(features), torch.zeros(1)], context)

    def _constrained(self, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(w, u, w.u, b)``."""
        w, u, b = self.parameters_at(context)
        product = (w * u).sum(1, keepdim=True)
        square = w.square().sum(1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
        wanted = above_minus_one(product)
        return w, u + (wanted - product) / square * w, wanted, b

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        w, u, product, b = self._constrained(context)
        h = torch.tanh((w * x).sum(1, keepdim=True) + b)
        return x + u * h, torch.log1p(product * (1 - h * h)).squeeze(1)

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        w, u, product, b = self._constrained(context)
        # a + (w.u) tanh(a + b) = w.z for a = w.x
        one = torch.ones_like(product)[..., None]
        a = tanh_root((w * z).sum(1, keepdim=True), product[..., None], one, b, "a planar step")
        h = torch.tanh(a + b)
        return z - u * h, -torch.log1p(product * (1 - h * h)).squeeze(1)


class Radial(Transform):
    """``z = x + beta (x - x0) / (alpha + r)`` with ``r = |x - x0|`` (Rezende & Mohamed 2015).

    The radial flow of arXiv:1505.05770. With ``beta = m alpha``, ``m > -1`` (here by `LEAST_SLOPE`: f is invertible
    whatever the weights are) and ``q = alpha / (alpha + r)``:

        z = x + m q (x - x0),     ladj = (D - 1) log(1 + m q) + log(1 + m q^2)

    The inverse is in closed form: with ``rho = |z - x0|``, ``r^2 + (alpha + m alpha - rho) r - alpha rho = 0``.

    Shapes: (batch, features) -> (batch, features).

    >>> step = Radial(3)
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(step.inverse(step(x)[0])[0], x, atol=1e-4))
    True
    """

    def __init__(self, features: int, context: int = 0) -> None:
        super().__init__()
        check_count("features", features)
        self.parameters_at = ContextParameters(
            [torch.randn(features), torch.zeros(1), 0.1 * torch.randn(1)], context
        )

    def _constrained(self, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """``(x0, alpha, m)``."""
        centre, log_alpha, m = self.parameters_at(context)
        return centre, soft_clip(log_alpha, 14.0).exp(), above_minus_one(m)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        centre, alpha, m = self._constrained(context)
        from_centre = x - centre
        q = alpha / (alpha + torch.linalg.vector_norm(from_centre, dim=1, keepdim=True))
        ladj = (x.shape[1] - 1) * torch.log1p(m * q) + torch.log1p(m * q * q)
        return x + m * q * from_centre, ladj.squeeze(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        centre, alpha, m = self._constrained(context)
        from_centre = z - centre
        rho = torch.linalg.vector_norm(from_centre, dim=1, keepdim=True)
        p = rho - alpha - m * alpha
        s = (p * p + 4 * alpha * rho).sqrt() + p.abs()
        r = torch.where(p > 0, s / 2, 2 * alpha * rho / s)  # neither subtracts what is nearly equal
        q = alpha / (alpha + r)
        ladj = (z.shape[1] - 1) * torch.log1p(m * q) + torch.log1p(m * q * q)
        return centre + from_centre / (1 + m * q), -ladj.squeeze(1)


class Sylvester(Transform):
    """``z = x + Q R tanh(S Q^T x + b)``, ``ladj = sum_i log(1 + R_ii S_ii tanh'_i)`` (Berg et al. 2018).

    The Householder form of arXiv:1803.05649: ``Q`` (features, rank) has orthonormal columns, those of a product of
    ``rank`` reflections. ``R`` and ``S`` are triangular (lower here and upper there, the same up to the order of the
    columns), ``S_ii > 0`` and ``R_ii S_ii`` above -1 by `LEAST_SLOPE`: f is invertible whatever the weights are.
    The inverse is a triangular system of ``rank`` equations, for ``Q^T x``.

    Shapes: (batch, features) -> (batch, features).

    >>> step = Sylvester(3, rank=2)
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(step.inverse(step(x)[0])[0], x, atol=1e-4))
    True
    """

    def __init__(self, features: int, context: int = 0, rank: int | None = None) -> None:
        super().__init__()
        check_count("features", features)
        rank = min(features, 16) if rank is None else rank
        check_count("rank", rank)
        if rank > features:
            raise ValueError(f"rank: expected at most {features}, the number of features; got {rank}.")
        self.features, self.rank = features, rank
        start = [
            torch.randn(rank * features),  # reflections
            0.1 * torch.randn(rank * rank),  # R below the diagonal, S above it, R_ii S_ii on it
            torch.zeros(rank),  # log S_ii
            torch.randn(rank),  # b
        ]
        self.parameters_at = ContextParameters(start, context)

    def _constrained(self, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``(Q, R, S, R_ii S_ii, b)``."""
        vectors, square, log_diagonal, b = self.parameters_at(context)
        square = square.unflatten(1, (self.rank, self.rank))
        product = above_minus_one(square.diagonal(dim1=1, dim2=2))
        diagonal = soft_clip(log_diagonal, 7.0).exp()
        left = square.tril(-1) + torch.diag_embed(product / diagonal)
        right = square.triu(1).mT + torch.diag_embed(diagonal)
        vectors = normalize(vectors.unflatten(1, (self.rank, self.features)), dim=2)
        q = torch.eye(self.features, self.rank, dtype=b.dtype, device=b.device)[None]
        for v in vectors.unbind(1):
            q = q - 2 * v[:, :, None] * (v[:, None] @ q)
        return q, left, right, product, b

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with without_autocast(x):
            q, left, right, product, b = self._constrained(context)
            shift, slope = tanh_shift((x[:, None] @ q)[:, 0], left, right, b)
            return x + (q @ shift[..., None])[..., 0], torch.log1p(product * slope).sum(1)

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with without_autocast(z):
            q, left, right, product, b = self._constrained(context)
            y = tanh_root((z[:, None] @ q)[:, 0], left, right, b, "a Sylvester step")
            shift, slope = tanh_shift(y, left, right, b)
            return z - (q @ shift[..., None])[..., 0], -torch.log1p(product * slope).sum(1)

    def extra_repr(self) -> str:
        return f"{self.features}, rank={self.rank}"
