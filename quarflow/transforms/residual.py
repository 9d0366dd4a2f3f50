"""The residual block ``z = x + F(x)``."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from quarflow.logdet import DiagonalLogDet
from quarflow.solvers import Newton, Solution, Solver, conditioned, implicit
from quarflow.transforms.base import Transform


class Residual(Transform):
    """``z = x + F(x)``, with the network, the log-determinant and the solver of the inverse as arguments.

    Args:
        net: ``net(x, context) -> (F(x), d(x))``; ``d`` is the diagonal of ``dF/dx`` if that is lower
            triangular, else None. ``net.sigma`` < 1 bounds ``|d_i|`` (with a diagonal) or ``||dF/dx||`` (without).
        logdet: ``logdet(net, x, context) -> (F(x), log|det(I + dF/dx)|)``.
        solver: of ``x + F(x) = z``.

    >>> from quarflow.nn.triangular import TriangularNet
    >>> block = Residual(TriangularNet(2, hidden=(8,)))
    >>> x = torch.randn(5, 2)
    >>> z, ladj = block(x)
    >>> bool((block.inverse(z)[0] - x).abs().max() < 1e-4)
    True
    """

    def __init__(self, net: nn.Module, logdet: nn.Module | None = None, solver: Solver | None = None) -> None:
        super().__init__()
        self.net = net
        self.logdet = DiagonalLogDet() if logdet is None else logdet
        self.solver: Solver = Newton() if solver is None else solver
        self.exact = bool(self.logdet.exact)
        self.sigma = float(cast("float", net.sigma))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, ladj = self.logdet(self.net, x, context)
        return x + value, ladj

    @torch.no_grad()
    def solve(self, z: Tensor, context: Tensor | None = None) -> Solution:
        """The inverse with its statistics; rows that failed are marked, not raised."""
        prepare = getattr(self.net, "prepare", None)
        return self.solver(prepare(context) if prepare else lambda x: self.net(x, context), z, self.sigma)

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        solution = self.solve(z, context).check(self.solver.advice)
        if torch.is_grad_enabled():
            x = implicit(lambda x: self.net(x, context), solution, z)
            if x.requires_grad:
                return x, -self.logdet(self.net, x, context)[1]
        if solution.diagonal is not None and isinstance(self.logdet, DiagonalLogDet):
            return solution.x, -self.logdet.from_diagonal(solution.diagonal)
        return solution.x, -self.logdet(self.net, solution.x, context)[1]
