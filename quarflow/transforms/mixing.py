"""Maps that mix the coordinates: permutations and LU-factored linear maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quarflow.checks import check_count
from quarflow.transforms.base import Transform


class Permutation(Transform):
    """``z_i = x_{order[i]}``; ``ladj = 0``.

    >>> Permutation(torch.tensor([2, 0, 1]))(torch.tensor([[1.0, 2.0, 3.0]]))[0]
    tensor([[3., 1., 2.]])
    """

    order: Tensor

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        order = torch.as_tensor(order)
        if order.ndim != 1 or order.is_floating_point() or order.sort().values.tolist() != list(range(len(order))):
            raise ValueError(f"order: expected a permutation of 0 .. n-1; got {order.tolist()}.")
        self.register_buffer("order", order)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x[:, self.order], x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return z[:, self.order.argsort()], z.new_zeros(z.shape[0])

    def extra_repr(self) -> str:
        return str(self.order.tolist())


class Reverse(Transform):
    """``z_i = x_{D+1-i}``; ``ladj = 0``. Of images, all axes are reversed: that reverses either order of coordinates.

    >>> Reverse()(torch.tensor([[1.0, 2.0, 3.0]]))[0]
    tensor([[3., 2., 1.]])
    """

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.flip(tuple(range(1, x.ndim))), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.forward(z)


class LULinear(Transform):
    """``z = L U x + b``, ``L`` unit lower and ``U`` upper triangular with diagonal ``exp(s)``; ``ladj = sum s``.

    >>> LULinear(2)(torch.ones(1, 2))[1]
    tensor([0.], grad_fn=<ExpandBackward0>)
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        check_count("features", features)
        self.features = features
        self.lower = nn.Parameter(torch.zeros(features, features))
        self.upper = nn.Parameter(torch.zeros(features, features))
        self.log_diagonal = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def factors(self) -> tuple[Tensor, Tensor]:
        """``(L, U)``."""
        identity = torch.eye(self.features, dtype=self.lower.dtype, device=self.lower.device)
        return self.lower.tril(-1) + identity, self.upper.triu(1) + torch.diag(self.log_diagonal.exp())

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            lower, upper = self.factors()
            return x @ (lower @ upper).mT + self.bias, self.log_diagonal.sum().expand(x.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.autocast(z.device.type, enabled=False):
            lower, upper = self.factors()
            y = torch.linalg.solve_triangular(lower, (z - self.bias).mT, upper=False, unitriangular=True)
            x = torch.linalg.solve_triangular(upper, y, upper=True).mT
            return x, -self.log_diagonal.sum().expand(z.shape[0])

    def extra_repr(self) -> str:
        return str(self.features)
