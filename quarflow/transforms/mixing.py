"""Maps that mix the coordinates: permutations and linear maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quarflow.checks import check_count
from quarflow.transforms.base import Transform
from quarflow.transforms.elementwise import moments


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
    """``z = P (L U x + b)``: ``L`` unit lower, ``U`` upper triangular with diagonal ``exp(s)``; ``ladj = sum s``.

    Of images (batch, C, H, W) it mixes the channels of each pixel: the invertible 1x1 convolution of Glow (Kingma &
    Dhariwal 2018, arXiv:1807.03039), with ``ladj = H W sum s``. It starts as the identity, or with ``rotation=True`` as
    a random rotation, as published; then ``P`` is a fixed permutation.

    Shapes: (batch, features, ...) -> (batch, features, ...).

    >>> LULinear(2)(torch.ones(1, 2))[1]
    tensor([0.], grad_fn=<ExpandBackward0>)
    >>> x = torch.randn(1, 3, 4, 4)
    >>> bool(torch.allclose(LULinear(3, rotation=True)(x)[0].norm(dim=1), x.norm(dim=1), atol=1e-5))
    True
    """

    order: Tensor | None

    def __init__(self, features: int, rotation: bool = False) -> None:
        super().__init__()
        check_count("features", features)
        self.features = features
        self.lower = nn.Parameter(torch.zeros(features, features))
        self.upper = nn.Parameter(torch.zeros(features, features))
        self.log_diagonal = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("order", self._rotate() if rotation else None)

    @torch.no_grad()
    def _rotate(self) -> Tensor:
        """Sets ``L U`` to a random rotation but for the order of its rows; returns that order."""
        permutation, lower, upper = torch.linalg.lu(nn.init.orthogonal_(torch.empty_like(self.lower)))
        # Columns of either sign make a rotation: those are taken that leave the diagonal of U positive.
        upper = upper * upper.diagonal().sign()
        self.lower.copy_(lower.tril(-1))
        self.upper.copy_(upper.triu(1))
        self.log_diagonal.copy_(upper.diagonal().log())
        return permutation.argmax(1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """``(L, U)``."""
        identity = torch.eye(self.features, dtype=self.lower.dtype, device=self.lower.device)
        return self.lower.tril(-1) + identity, self.upper.triu(1) + torch.diag(self.log_diagonal.exp())

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            lower, upper = self.factors()
            weight = lower @ upper
            bias: Tensor = self.bias
            if self.order is not None:
                weight, bias = weight[self.order], bias[self.order]
            return (x.movedim(1, -1) @ weight.mT + bias).movedim(-1, 1), self._total(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.autocast(z.device.type, enabled=False):
            lower, upper = self.factors()
            y = z if self.order is None else z[:, self.order.argsort()]
            y = y.movedim(1, 0)
            columns = y.flatten(1) - self.bias[:, None]
            columns = torch.linalg.solve_triangular(lower, columns, upper=False, unitriangular=True)
            x = torch.linalg.solve_triangular(upper, columns, upper=True)
            return x.view(y.shape).movedim(0, 1), -self._total(z)

    def _total(self, x: Tensor) -> Tensor:
        places = x.shape[2:].numel()
        total = self.log_diagonal.sum()
        return (total if places == 1 else places * total).expand(x.shape[0])

    def extra_repr(self) -> str:
        return f"{self.features}{'' if self.order is None else ', rotation=True'}"


class Whiten(Transform):
    """``z = A (x - mean)``, ``A`` lower triangular, from the data seen by `initialise`: then ``cov z`` is about one.

    ``A^T A`` is the inverse of their covariance, its correlations drawn towards zero by ``(D / (n + D))^2``
    against those that chance makes in few rows, and by 1e-6 or more, so that there is an inverse.

    >>> t = Whiten(2)
    >>> x = torch.randn(1000, 2) @ torch.tensor([[1.0, 2.0], [0.0, 0.5]])
    >>> torch.allclose(t.initialise(x).T.cov(), torch.eye(2), atol=0.05)
    True
    """

    triangular = True
    mean: Tensor
    log_scale: Tensor
    lower: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        check_count("features", features)
        # A = exp(log_scale) (I + lower)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("log_scale", torch.zeros(features))
        self.register_buffer("lower", torch.zeros(features, features))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x - self.mean
        z = self.log_scale.exp() * (y + y @ self.lower.tril(-1).mT)
        return z, self.log_scale.sum().expand(len(x))

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.forward(x)[0], self.log_scale.expand_as(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = ((-self.log_scale).exp() * z).mT
        x = torch.linalg.solve_triangular(self.lower.tril(-1), y, upper=False, unitriangular=True).mT
        return x + self.mean, -self.log_scale.sum().expand(len(z))

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        mean, deviation = moments(x, self.mean.shape, "Whiten")
        n, d = x.shape
        u = ((x - mean) / deviation).double()
        correlation = u.mT @ u / (n - 1) * (1 - max((d / (n + d)) ** 2, 1e-6))
        factor = torch.linalg.cholesky(correlation.fill_diagonal_(1))
        a = torch.linalg.solve_triangular(factor, torch.eye(d).to(factor), upper=False) / deviation.double()
        scale = a.diagonal()
        self.mean.copy_(mean)
        self.log_scale.copy_(scale.log())
        self.lower.copy_((a / scale[:, None]).tril(-1))
        return self.forward(x, context)[0]
