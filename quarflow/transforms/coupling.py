"""Coupling layers: half of the coordinates stay, and say what happens to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quarflow.checks import check_count, check_positive
from quarflow.nn.masked import MaskedMLP, soft_clip
from quarflow.transforms.base import Transform


class Coupling(Transform):
    """What `AdditiveCoupling` and `AffineCoupling` share: ``x = (x_a, x_b)``, ``x_a`` the first ``D // 2`` coordinates.

    A flow of couplings needs mixing between them, or ``x_a`` is never changed.
    """

    outputs: int

    def __init__(
        self, features: int, context: int = 0, hidden: Sequence[int] = (64, 64), activation: str = "relu"
    ) -> None:
        super().__init__()
        check_count("features", features)
        if features < 2:
            raise ValueError(
                f"features: coupling needs at least 2 features, one that stays and one that changes; got {features}. "
                "Use an autoregressive or a residual transform."
            )
        stay = features // 2
        self.sizes = [stay, features - stay]
        # Every input has rank 0 and every target rank 1: all is read, nothing masked.
        ranks = torch.zeros(stay, dtype=torch.int64), torch.ones(features - stay, dtype=torch.int64)
        self.net = MaskedMLP(*ranks, self.outputs, hidden, context, activation)

    def extra_repr(self) -> str:
        return f"{self.sizes[0]} stay, {self.sizes[1]} change"


class AdditiveCoupling(Coupling):
    """``z_a = x_a,  z_b = x_b + t(x_a)``; ``ladj = 0`` (NICE, Dinh et al. 2014, arXiv:1410.8516).

    >>> AdditiveCoupling(2, hidden=(8,))(torch.zeros(1, 2))[1]
    tensor([0.])
    """

    outputs = 1

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = x.split(self.sizes, 1)
        return torch.cat([stay, change + self.net(stay, context)[..., 0]], 1), x.new_zeros(len(x))

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = z.split(self.sizes, 1)
        return torch.cat([stay, change - self.net(stay, context)[..., 0]], 1), z.new_zeros(len(z))


class AffineCoupling(Coupling):
    """``z_a = x_a,  z_b = x_b exp(s(x_a)) + t(x_a)``; ``ladj = sum s`` (RealNVP, Dinh et al. 2016, arXiv:1605.08803).

    ``s = a / (1 + |a| / limit)`` of the network's output ``a``, so that no exponential overflows.

    >>> step = AffineCoupling(3, hidden=(8,))
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(step.inverse(step(x)[0])[0], x, atol=1e-5))
    True
    """

    outputs = 2

    def __init__(
        self,
        features: int,
        context: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        limit: float = 7.0,
    ) -> None:
        super().__init__(features, context, hidden, activation)
        check_positive("limit", limit)
        self.limit = limit

    def parameters_at(self, stay: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(t, s)``, each (batch, coordinates that change)."""
        t, a = self.net(stay, context).unbind(2)
        return t, soft_clip(a, self.limit)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = x.split(self.sizes, 1)
        t, s = self.parameters_at(stay, context)
        return torch.cat([stay, change * s.exp() + t], 1), s.sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = z.split(self.sizes, 1)
        t, s = self.parameters_at(stay, context)
        return torch.cat([stay, (change - t) * (-s).exp()], 1), -s.sum(1)
