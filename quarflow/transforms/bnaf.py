"""Block neural autoregressive flow: a masked network that increases in each coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from quarflow.checks import check_count, check_layers
from quarflow.nn.masks import ranks, triangular_mask
from quarflow.nn.triangular import diagonal_blocks, without_autocast
from quarflow.solvers import conditioned, follow, solve_increasing
from quarflow.transforms.base import Transform


def log_matmul_exp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) exp(b))``, each row of ``a`` and column of ``b`` relative to its largest entry, against overflow.

    Shapes: (..., m, k), (..., k, n) -> (..., m, n).

    >>> log_matmul_exp(torch.tensor([[1000.0, 1000.0]]), torch.tensor([[500.0], [500.0]]))
    tensor([[1500.6931]])
    """
    row, column = a.detach().amax(-1, keepdim=True), b.detach().amax(-2, keepdim=True)
    # A product that vanishes beside the largest ones stays a number.
    product = ((a - row).exp() @ (b - column).exp()).clamp_min(torch.finfo(a.dtype).tiny)
    return product.log() + row + column


class PositiveBlockLinear(nn.Module):
    """``h = W a + b + C c`` and ``log(W[i,i] exp(delta_i))``: block lower triangular, diagonal blocks positive.

    ``W = exp(g) V / |V|`` row by row, with ``V = exp(v)`` in the diagonal blocks and ``V = v`` below them.

    Shapes: ``a`` (features * in_units, batch), ``delta`` (features, in_units, batch or 1), ``c`` (context, batch).

    >>> weight, log_blocks = PositiveBlockLinear(2, 1, 3).matrices()
    >>> torch.allclose(weight[3:, 1:], log_blocks[1].exp())
    True
    """

    below: Tensor
    diagonal: Tensor

    def __init__(self, features: int, in_units: int, out_units: int, context: int = 0) -> None:
        super().__init__()
        self.features, self.in_units, self.out_units = features, in_units, out_units
        read, write = ranks(features, in_units), ranks(features, out_units)
        below = triangular_mask(read, write, strict=True)
        self.register_buffer("below", below, persistent=False)
        self.register_buffer("diagonal", triangular_mask(read, write) & ~below, persistent=False)
        fan_in = (below | self.diagonal).sum(1, keepdim=True)
        # Positive weights of different sizes, and bends all over standardised data: equal units would stay equal.
        spread = torch.where(self.diagonal, 1, below / fan_in.sqrt())
        self.weight = nn.Parameter(spread * torch.randn(below.shape))
        self.log_norm = nn.Parameter((3 * torch.rand(len(below), 1)).log())
        self.bias = nn.Parameter(3 * (2 * torch.rand(len(below), 1) - 1) / fan_in.sqrt())
        start = torch.randn(len(below), context) / (fan_in + context).sqrt()
        self.context = nn.Parameter(start) if context else None

    def matrices(self) -> tuple[Tensor, Tensor]:
        """``W`` (features * out, features * in), and the logarithm of its diagonal blocks (features, out, in)."""
        # Zeros go through exp where the result is not used: what is not used must not overflow either.
        positive = torch.where(self.diagonal, self.weight, 0).exp()
        v = torch.where(self.diagonal, positive, torch.where(self.below, self.weight, 0))
        log_scale = self.log_norm - 0.5 * v.square().sum(1, keepdim=True).log()
        return v * log_scale.exp(), diagonal_blocks(self.weight + log_scale, self.features)

    def offset(self, context: Tensor | None) -> Tensor:
        """``b + C c``, shape (features * out, batch) or (features * out, 1)."""
        return self.bias if self.context is None or context is None else self.bias + self.context @ context

    def forward(self, a: Tensor, delta: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weight, log_blocks = self.matrices()
        return torch.addmm(self.offset(context), weight, a), log_matmul_exp(log_blocks, delta)

    def extra_repr(self) -> str:
        context = "" if self.context is None else f", context={self.context.shape[1]}"
        return f"features={self.features}, units {self.in_units} -> {self.out_units}{context}"


class BNAF(Transform):
    """``z = (1 - s) x + s F(x)`` with a tanh network ``F`` increasing in each coordinate (De Cao et al. 2019).

    The block neural autoregressive flow of arXiv:1904.04676. ``F_i`` reads ``x_<=i``, and only positive weights lead
    from ``x_i`` to it. ``log dF_i/dx_i`` is carried through the layers beside the values, by products of matrices
    of logarithms. With the gate ``s = sigmoid(gate)``, ``ladj = sum_i log(1 - s + s dF_i/dx_i)``.

    ``F`` is bounded: without its gate, as in the last step of the published flow, most ``z`` would have no inverse.
    With it each ``f_i`` runs through all numbers, and the bounds of ``F`` bracket every root.

    Shapes: (batch, features) -> (batch, features).

    Args:
        features: number of coordinates.
        context: number of context features, 0 for none.
        hidden: units per coordinate of each hidden layer.

    >>> step = BNAF(3, hidden=(4,)).double()
    >>> x = torch.randn(3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: step(x[None])[0][0])(x)
    >>> jacobian.triu(1).abs().max().item()
    0.0
    >>> bool(torch.allclose(jacobian.diagonal().log().sum(), step(x[None])[1]))
    True
    """

    triangular = True

    def __init__(self, features: int, context: int = 0, hidden: Sequence[int] = (16, 16)) -> None:
        super().__init__()
        check_count("features", features)
        check_count("context", context, least=0)
        check_layers("hidden", hidden, (16, 16))
        self.features = features
        self.layers = nn.ModuleList(
            PositiveBlockLinear(features, read, write, context)
            for read, write in zip([1, *hidden[:-1]], hidden, strict=True)
        )
        self.last = PositiveBlockLinear(features, hidden[-1], 1, context)
        self.gate = nn.Parameter(torch.zeros(()))

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``f(x)`` and the logarithm of ``df_i/dx_i``, both (batch, features)."""
        with without_autocast(x):
            c = None if context is None else context.mT
            value, delta = x.mT, x.new_zeros(self.features, 1, 1)
            for layer in self.layers:
                h, delta = layer(value, delta, c)
                value = torch.tanh(h)
                # log(1 - tanh(h)^2); torch's softplus, the shorter way to say it, is exact to 2e-9 only.
                delta = delta + 2 * (log(2) - h + logsigmoid(2 * h)).unflatten(0, (self.features, -1))
            h, delta = self.last(value, delta, c)
            log_slope = logsigmoid(-self.gate) - logsigmoid(-self.gate - delta[:, 0].mT)
            return torch.sigmoid(-self.gate) * x + torch.sigmoid(self.gate) * h.mT, log_slope

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, log_slope = self.log_slopes(x, context)
        return value, log_slope.sum(1)

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with without_autocast(z):
            x = self._root(z, context)
            if torch.is_grad_enabled():
                at = x.requires_grad_()
                value = self.log_slopes(at, context)[0]
                rows = [torch.autograd.grad(v.sum(), at, retain_graph=True)[0] for v in value.unbind(1)]
                x = follow(at.detach(), value - z, torch.stack(rows, 1))
            return x, -self.log_slopes(x, context)[1].sum(1)

    @torch.no_grad()
    def _root(self, z: Tensor, context: Tensor | None) -> Tensor:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            value, log_slope = self.log_slopes(x, context)
            return value, log_slope.exp()

        # |tanh| <= 1, so F is within the sum of its last weights of its last offset.
        offset = self.last.offset(None if context is None else context.mT).mT
        reach = self.last.matrices()[0].abs().sum(1)
        s, rest = torch.sigmoid(self.gate), torch.sigmoid(-self.gate)
        low, high = (z - s * (offset + reach)) / rest, (z - s * (offset - reach)) / rest
        return solve_increasing(f, z, low, high, "a BNAF step")
