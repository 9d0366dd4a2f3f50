"""The residual block ``z = x + F(x)``, and the one whose ``F`` hears of the coordinates before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quarflow.logdet import DiagonalLogDet
from quarflow.nn.conditioned import ConditionedNet, Parts
from quarflow.solvers import Network, Newton, Solution, Solver, conditioned, implicit
from quarflow.transforms.base import Transform


class Residual(Transform):
    """``z = x + F(x)``, with the network, the log-determinant and the solver of the inverse as arguments.

    Args:
        net: ``net(x, context) -> (F(x), d(x))``; ``d`` is the diagonal of ``dF/dx`` if that is lower
            triangular, else None. ``net.sigma`` < 1 bounds ``|d_i|`` (with a diagonal) or ``||dF/dx||`` (without).
            ``net.axes``, if there is one and it is not None, brings the axes of ``x`` into the order of triangularity.
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
        self.triangular = isinstance(self.logdet, DiagonalLogDet) and getattr(net, "axes", None) is None
        self.sigma = float(cast("float", net.sigma))
        self.recompute = False  # see `recomputing`

    @property
    def repeatable(self) -> bool:
        """Whether `forward` draws no random numbers, in training too."""
        return self.exact and getattr(self.net, "bound", None) != "power"

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.recompute and torch.is_grad_enabled():
            # Nothing random, so no state to restore: that could not go into a CUDA graph.
            found = checkpoint(self._forward, x, context, use_reentrant=False, preserve_rng_state=False)
            return cast("tuple[Tensor, Tensor]", found)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        value, ladj = self.logdet(self.net, x, context)
        return x + value, ladj

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, diagonal = self.net(x, context)
        return x + value, torch.log1p(diagonal)

    @torch.no_grad()
    def solve(self, z: Tensor, context: Tensor | None = None, known: Tensor | None = None) -> Solution:
        """The inverse with its statistics; rows that failed are marked, not raised. Where ``known``, ``F`` is 0."""
        prepare = getattr(self.net, "prepare", None)
        net = prepare(context) if prepare else lambda x: self.net(x, context)
        if known is not None:
            net = _held(net, known)
        axes = getattr(self.net, "axes", None)
        if axes is None:
            return self.solver(net, z, self.sigma)
        there = (0, *axes)
        back = torch.tensor(there).argsort().tolist()

        def ordered(x: Tensor) -> tuple[Tensor, Tensor]:
            value, diagonal = net(x.permute(back))
            return value.permute(there), diagonal.permute(there)

        s = self.solver(ordered, z.permute(there), self.sigma)
        return replace(s, x=s.x.permute(back), diagonal=None if s.diagonal is None else s.diagonal.permute(back))

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

    def inverse_given(self, z: Tensor, x: Tensor, known: Tensor, context: Tensor | None = None) -> Tensor:
        # The block that leaves what is known as it is: the solver starts with it, and finds it solved.
        return self.solve(torch.where(known, x, z), context, known).check(self.solver.advice).x


class ConditionedResidual(Transform):
    """``z_i = exp(a_i) (x_i + F_i(x_i; h_i)) + t_i``, with ``a_i, t_i, h_i`` any functions of ``x_<i`` and context.

        ladj = sum_i a_i + log(1 + d_i),        d_i = dF_i/dx_i

    Only the one-dimensional ``F_i`` is bounded, ``|d_i| <= sigma``: given what is before it, each ``z_i`` increases
    with ``x_i``. The inverse solves ``x_i + F_i = (z_i - t_i) exp(-a_i)``, a triangular system with the slopes of a
    residual block, by the same solvers.

    Args:
        net: ``net(x, context) -> (F, d, a, t)``, as `quarflow.nn.conditioned.ConditionedNet`.
        solver: of the inverse.

    >>> from quarflow.nn.conditioned import ConditionedNet
    >>> block = ConditionedResidual(ConditionedNet(2, hidden=(8,)))
    >>> x = torch.randn(5, 2)
    >>> z, ladj = block(x)
    >>> bool((block.inverse(z)[0] - x).abs().max() < 1e-4)
    True
    """

    triangular = True

    def __init__(self, net: ConditionedNet, solver: Solver | None = None) -> None:
        super().__init__()
        self.net = net
        self.solver: Solver = Newton() if solver is None else solver

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, diagonal, a, t = self.net(x, context)
        return torch.addcmul(t, a.exp(), x + value), a + torch.log1p(diagonal)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = self.log_slopes(x, context)
        return z, slopes.sum(1)

    def solve(
        self, z: Tensor, context: Tensor | None = None, x: Tensor | None = None, known: Tensor | None = None
    ) -> Solution:
        """The inverse with its statistics, ``x`` where ``known``; residuals are of ``x + F = (z - t) exp(-a)``."""
        net, target = _equation(self.net.prepare(context), z), torch.zeros_like(z)
        if x is not None and known is not None:
            net, target = _held(net, known), torch.where(known, x, target)
        with torch.no_grad():
            return self.solver(net, target, self.net.sigma)

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        solution = self.solve(z, context).check(self.solver.advice)
        x = solution.x
        if torch.is_grad_enabled():
            x = implicit(_equation(lambda x: self.net(x, context), z), solution, torch.zeros_like(z))
        return x, -self.log_slopes(x, context)[1].sum(1)

    def inverse_given(self, z: Tensor, x: Tensor, known: Tensor, context: Tensor | None = None) -> Tensor:
        return self.solve(z, context, x, known).check(self.solver.advice).x


def _equation(net: Callable[[Tensor], Parts], z: Tensor) -> Network:
    """``G(x) = F - (z - t) exp(-a)``, with the diagonal of ``F``: ``x + G(x) = 0`` at the inverse of ``z``."""

    def equation(x: Tensor) -> tuple[Tensor, Tensor | None]:
        value, diagonal, a, t = net(x)
        return value - (z - t) * (-a).exp(), diagonal

    return equation


def _held(net: Network, known: Tensor) -> Network:
    def held(x: Tensor) -> tuple[Tensor, Tensor | None]:
        value, diagonal = net(x)
        return value.masked_fill(known, 0), None if diagonal is None else diagonal.masked_fill(known, 0)

    return held


@contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Within it, residual blocks keep their inputs alone for the backward pass, which makes the rest again.

    The gradients are the same, for a third more time. Blocks that draw random numbers are left as they are.

    >>> from quarflow.nn.triangular import TriangularNet
    >>> block, x = Residual(TriangularNet(2, hidden=(8,))), torch.randn(5, 2)
    >>> with recomputing(block):
    ...     again = torch.autograd.grad(block(x)[1].sum(), list(block.parameters()), allow_unused=True)
    >>> once = torch.autograd.grad(block(x)[1].sum(), list(block.parameters()), allow_unused=True)
    >>> all(a is b or torch.equal(a, b) for a, b in zip(again, once))
    True
    """
    blocks = [m for m in module.modules() if isinstance(m, Residual) and m.repeatable]
    if not blocks:
        raise ValueError(
            "recompute: expected a flow with residual blocks that draw no random numbers; got none. Leave it out; "
            "estimated log-determinants have memory_saving=True instead."
        )
    before = [block.recompute for block in blocks]
    try:
        for block in blocks:
            block.recompute = True
        yield
    finally:
        for block, value in zip(blocks, before, strict=True):
            block.recompute = value
