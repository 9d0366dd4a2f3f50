"""One-dimensional networks, bounded, one for each coordinate, whose hidden units hear of the coordinates before it.

Inside, arrays have shape (features, units, batch): every product is a batched one over the coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from quarflow.checks import check_choice, check_count, check_layers, check_positive
from quarflow.nn.activations import activation as make_activation
from quarflow.nn.masked import MADE, MaskedLinear, soft_clip
from quarflow.nn.masks import Panels
from quarflow.nn.triangular import BoundedNet

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


class BlockLinear(nn.Module):
    """``h_i = W[i] a_i`` for each coordinate: (features, in_units, batch) -> (features, out_units, batch).

    >>> weight, blocks = BlockLinear(2, 1, 3).matrices()
    >>> weight.shape, weight is blocks
    (torch.Size([2, 3, 1]), True)
    """

    panels: Panels = ()

    def __init__(self, features: int, in_units: int, out_units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, out_units, in_units) / in_units**0.5)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The weight, which is all diagonal blocks, twice: as `TriangularLinear` gives them."""
        return self.weight, self.weight

    def extra_repr(self) -> str:
        features, write, read = self.weight.shape
        return f"features={features}, units {read} -> {write}"


class ConditionedNet(BoundedNet):
    """``x -> (F(x), d(x), a(x), t(x))``: ``F_i(x_i; h_i)`` is bounded, and ``a_i, t_i, h_i`` read ``x_<i`` and context.

        h_i = (h_i1 .. h_iL), a_i, t_i from x_<i and c, by a masked network
        v_0 = x_i,  v_l = phi(W_l[i] v_{l-1} + h_il),  F_i = W_L+1[i] v_L,      d_i = dF_i/dx_i,  |d_i| <= sigma

    Nothing bounds what comes from ``x_<i``: the masked network is of any steepness. ``|a| < limit``, so that no
    exponential overflows. The bound is that of one-dimensional networks: see `quarflow.nn.bounds`.

    Shapes: (batch, features) -> four of (batch, features).

    Args:
        features: number of coordinates D.
        hidden: units per coordinate of each hidden layer of ``F``.
        conditioner: units of each hidden layer of the masked network, for all coordinates together.
        context: number of context features, 0 for none.
        activation: of ``F``, a name in `quarflow.nn.activations.ACTIVATIONS`.
        lipschitz: "coordinate", or "diagonal", the largest bound for all.
        sigma, trick, bound: as in `quarflow.nn.triangular.TriangularNet`.
        limit: of ``a``.

    >>> net = ConditionedNet(3, hidden=(4,), conditioner=(8,)).double()
    >>> x = torch.randn(3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: net(x[None])[0][0])(x)
    >>> bool(torch.allclose(jacobian.diagonal(), net(x[None])[1][0]))
    True
    >>> jacobian.triu(1).abs().max().item()
    0.0
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (16, 16),
        conditioner: Sequence[int] = (64, 64),
        context: int = 0,
        activation: str = "wave",
        lipschitz: str = "coordinate",
        sigma: float = 0.97,
        trick: bool = True,
        bound: str | None = None,
        limit: float = 7.0,
    ) -> None:
        check_count("features", features)
        check_choice("lipschitz", lipschitz, ("coordinate", "diagonal"))  # nothing bounds the rest of the Jacobian
        check_positive("limit", limit)
        check_layers("hidden", hidden, (16, 16))
        check_layers("conditioner", conditioner, (64, 64), least=0)
        activations = [make_activation(activation) for _ in hidden]
        outputs = [units * a.width for units, a in zip(hidden, activations, strict=True)]
        sizes = zip([1, *outputs], [*hidden, 1], strict=True)
        layers = [BlockLinear(features, read, write) for read, write in sizes]
        super().__init__(features, layers, activations, None, lipschitz, sigma, trick, bound)
        self.hidden, self.limit, self.context_features = tuple(hidden), limit, context
        self.conditioner = MADE(features, 2 + sum(hidden), conditioner, context, "silu")
        with torch.no_grad():
            # The units of a coordinate bend at different places, from the start.
            bias = cast("MaskedLinear", self.conditioner.layers[-1]).bias.view(features, -1)[:, 2:]
            bias.copy_(torch.randn_like(bias))

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """As in `BoundedNet`; ``a`` and ``t`` too."""
        super().shrink(factor)
        last = cast("MaskedLinear", self.conditioner.layers[-1])
        for p in last.parameters():
            p.unflatten(0, (self.features, -1))[:, :2].mul_(factor)

    def _parts(self, run: Callable[..., tuple[Tensor, Tensor]], x: Tensor, context: Tensor | None) -> Parts:
        a, t, *h = self.conditioner.columns(x, context).split([1, 1, *self.hidden], 1)
        value, diagonal = run(x.mT[:, None], [*h, x.new_zeros(self.features, 1, 1)])
        return value[:, 0].mT.to(x.dtype), diagonal.mT, soft_clip(a[:, 0].mT, self.limit), t[:, 0].mT

    @torch.no_grad()
    def prepare(self, context: Tensor | None = None) -> Callable[[Tensor], Parts]:
        """`forward` without gradients at one context, for solvers: what does not depend on ``x`` is done once."""
        run = self._prepared()
        return lambda x: self._parts(run, x, context)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Parts:
        return self._parts(self._run, x, context)
