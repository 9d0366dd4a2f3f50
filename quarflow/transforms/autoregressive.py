"""The masked autoregressive step, affine in each coordinate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quarflow.checks import check_positive
from quarflow.nn.masked import MADE, soft_clip
from quarflow.transforms.base import Transform


class MaskedAffine(Transform):
    """``z_i = (x_i - m_i) exp(-s_i)``, ``m_i`` and ``s_i`` functions of ``x_<i`` and context; ``ladj = -sum_i s_i``.

    A step of a masked autoregressive flow (Papamakarios et al. 2017, arXiv:1705.07057); its `Inverse` is one of an
    inverse autoregressive flow (Kingma et al. 2016, arXiv:1606.04934). `forward` is one pass of the network. `inverse`
    is exact: one pass for each coordinate, in their order, with ordinary gradients.

    ``s = a / (1 + |a| / limit)`` of the network's output ``a``: a step scales by no more than ``exp(limit)``, by
    default about a thousand, so that no exponential overflows.

    Shapes: (batch, features) -> (batch, features).

    >>> step = MaskedAffine(3, hidden=(8,)).double()
    >>> x = torch.randn(3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: step(x[None])[0][0])(x)
    >>> jacobian.triu(1).abs().max().item()
    0.0
    >>> bool(torch.allclose(jacobian.diagonal().log().sum(), step(x[None])[1]))
    True
    """

    triangular = True

    def __init__(
        self,
        features: int,
        context: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        limit: float = 7.0,
    ) -> None:
        super().__init__()
        check_positive("limit", limit)
        self.limit = limit
        self.net = MADE(features, 2, hidden, context, activation)

    def parameters_at(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(m, s)``, each (batch, features)."""
        m, a = self.net(x, context).unbind(2)
        return m, soft_clip(a, self.limit)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        m, s = self.parameters_at(x, context)
        return (x - m) * (-s).exp(), -s

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = self.log_slopes(x, context)
        return z, slopes.sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._inverse(z, torch.zeros_like(z), 0, context)

    def inverse_given(self, z: Tensor, x: Tensor, known: Tensor, context: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self._inverse(z, torch.where(known, x, 0), int(known.sum()), context)[0]

    def _inverse(self, z: Tensor, x: Tensor, first: int, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """From coordinate ``first`` on, with ``x`` before it. Those ahead stay zero: nothing unfinished overflows."""
        position, ladj = torch.arange(z.shape[1], device=z.device), z.new_zeros(len(z))
        for i in range(first, z.shape[1]):
            m, s = self.parameters_at(x, context)
            x = torch.where(position == i, z * s.exp() + m, x)
            ladj = ladj + s[:, i]
        return x, ladj

    def extra_repr(self) -> str:
        return f"limit={self.limit}"
