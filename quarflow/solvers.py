"""Solvers of ``x + F(x) = z`` for the inverse of a residual block.

A network gives ``(F(x), d(x))``: ``d`` is the diagonal of its Jacobian if that is lower triangular, or None. The stop
test is on the residual ``r = x + F(x) - z``: each ``|r_i|`` must be at most

    tolerance * max(1, |x_i|, |F_i|, |z_i|),        by default tolerance = 32 eps of the dtype.

==============  =======================================  =====================  ==================================
solver          needs                                    steps                  use
==============  =======================================  =====================  ==================================
`Banach`        ``||dF/dx|| < 1``, or triangular         log(tol) / log(sigma)  the paper's Algorithm 1
`Newton`        triangular, ``|d_i| <= sigma`` (a bound)  4-8 in practice        the default; bounded whatever F is
`Bracketing`    the same                                 at most ~60 D          the net under Newton, on its own
==============  =======================================  =====================  ==================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from quarflow.checks import check_count, check_positive

Network = Callable[[Tensor], tuple[Tensor, Tensor | None]]
Inverse = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        x: (batch, *event), the point at which ``residual`` was measured.
        steps: evaluations of the network.
        residual: (batch,), the largest ``|x + F(x) - z|`` of each row.
        converged: (batch,), whether each row met the stop test.
        diagonal: ``d(x)``, if the network gives one.
        tolerance: the relative tolerance of the stop test.

    >>> solution = Newton()(lambda x: (x / 2, torch.full_like(x, 0.5)), torch.ones(2, 3), 0.5)
    >>> solution.x.shape, solution.steps < 10, solution.converged
    (torch.Size([2, 3]), True, tensor([True, True]))
    """

    x: Tensor
    steps: int
    residual: Tensor
    converged: Tensor
    diagonal: Tensor | None
    tolerance: float

    def check(self, advice: str, name: str = "a residual block") -> Solution:
        """Itself, or `NotConverged` if a row failed."""
        if not bool(self.converged.all()):
            failed = int((~self.converged).sum())
            finite = bool(torch.isfinite(self.residual).all())
            raise NotConverged(
                f"the inverse of {name} did not reach its tolerance of {self.tolerance:.1e} in {failed} of "
                f"{len(self.converged)} rows: after {self.steps} steps the largest |f(x) - z| is "
                f"{self.residual.max().item():.1e}. "
                + (advice if finite else "Look for NaN or inf in the weights and in z."),
                self,
            )
        return self


class NotConverged(ArithmeticError):
    """An inverse that cannot be had to its tolerance; ``.solution`` is what a solver reached.

    >>> try:
    ...     Banach(max_steps=3)(lambda x: (0.9 * x, None), torch.ones(1, 1), 0.9).check("Raise max_steps.")
    ... except NotConverged as error:
    ...     error.solution.steps
    3
    """

    def __init__(self, message: str, solution: Solution | None = None) -> None:
        super().__init__(message)
        self.solution = solution


class Solver(Protocol):
    """``solver(net, z, sigma) -> Solution``; ``sigma`` bounds the slopes ``|d_i|`` of the network.

    >>> solver: Solver = Newton(tolerance=1e-3)
    >>> solver(lambda x: (x / 2, torch.full_like(x, 0.5)), torch.ones(1, 1), 0.5).x
    tensor([[0.6667]])
    """

    advice: str

    def __call__(self, net: Network, z: Tensor, sigma: float) -> Solution: ...


def default_tolerance(dtype: torch.dtype) -> float:
    """32 units in the last place of 1: 3.8e-6 in float32, 7.1e-15 in float64.

    >>> default_tolerance(torch.float32) < 1e-5
    True
    """
    return 32 * torch.finfo(dtype).eps


def _scale(x: Tensor, value: Tensor, z: Tensor) -> Tensor:
    """What rounding in ``x + F(x) - z`` is relative to."""
    return torch.maximum(torch.maximum(x.abs(), value.abs()), z.abs()).clamp_min(1)


@dataclass(frozen=True)
class Banach:
    """Algorithm 1 of the paper: ``x <- z - F(x)``.

    Under a contraction the error falls by sigma at each step. Under a bound on the diagonal alone it converges too
    (coordinate after coordinate), but may grow first.

    >>> solution = Banach()(lambda x: (0.5 * x.sin(), None), torch.ones(1, 1), 0.5)
    >>> bool(solution.converged), solution.residual.item() < 1e-5
    (True, True)
    """

    tolerance: float | None = None
    max_steps: int = 2000
    advice = "Raise max_steps, take solver 'newton' if the Jacobian is triangular, lower sigma, or use float64."

    def __post_init__(self) -> None:
        _check_options(self.tolerance, self.max_steps)

    def __call__(self, net: Network, z: Tensor, sigma: float) -> Solution:
        tolerance = self.tolerance or default_tolerance(z.dtype)
        x = z
        for step in range(1, self.max_steps + 1):
            value, diagonal = net(x)
            r = (x + value - z).abs()
            settled = (r <= tolerance * _scale(x, value, z)).flatten(1).all(1)
            if step == self.max_steps or bool(settled.all()) or not bool(torch.isfinite(r).all()):
                break
            # A row that has converged stays where its residual was measured.
            x = torch.where(settled.view(-1, *[1] * (x.ndim - 1)), x, z - value)
        return Solution(x, step, r.flatten(1).amax(1), settled, diagonal, tolerance)


@dataclass(frozen=True)
class Newton:
    """Diagonal Newton, ``x <- x - (x + F(x) - z) / (1 + d(x))``, on all coordinates at once, with a net under it.

    At the solution the iteration matrix is strictly triangular, so convergence is superlinear. The net: once the
    coordinates before ``i`` are settled they stay as they are, and ``x_i + F_i`` is an increasing function of ``x_i``
    with slopes in ``[1 - sigma, 1 + sigma]``. So a residual ``r_i`` brackets the root between ``x_i - r_i/(1 + sigma)``
    and ``x_i - r_i/(1 - sigma)``; a Newton step that leaves the bracket, or a residual that did not halve, gives way to
    its midpoint. Each coordinate then ends in a bounded number of steps, whatever the weights are.

    With ``parallel=False`` coordinates wait for those before them: `Bracketing`, the worst case on its own.

    >>> solution = Newton()(lambda x: (0.9 * x.sin(), 0.9 * x.cos()), torch.ones(1, 1), 0.9)
    >>> bool(solution.converged), solution.steps < 10
    (True, True)
    """

    tolerance: float | None = None
    max_steps: int | None = None
    parallel: bool = True
    advice = "Use float64 (flow.double()), lower sigma, or give the solver a tolerance that this dtype can reach."

    def __post_init__(self) -> None:
        _check_options(self.tolerance, self.max_steps)

    def __call__(self, net: Network, z: Tensor, sigma: float) -> Solution:
        if z.ndim != 2:
            shape = z.shape

            def flat_net(x: Tensor) -> tuple[Tensor, Tensor | None]:
                value, diagonal = net(x.view(-1, *shape[1:]))
                return value.flatten(1), None if diagonal is None else diagonal.flatten(1)

            s = self(flat_net, z.flatten(1), sigma)
            return replace(s, x=s.x.view(shape), diagonal=cast("Tensor", s.diagonal).view(shape))

        def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value, diagonal = net(x)
            if diagonal is None:
                raise ValueError("solver: Newton needs a network with a Jacobian diagonal; got none. Use Banach().")
            return x + value, 1 + diagonal, torch.maximum(x.abs(), value.abs())

        def bracket(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            near, far = x - r / (1 + sigma), x - r / (1 - sigma)
            return torch.minimum(near, far), torch.maximum(near, far)

        start = z, torch.full_like(z, -torch.inf), torch.full_like(z, torch.inf)
        s = solve_triangular(f, z, bracket, start, self.tolerance, self.max_steps, self.parallel)
        return replace(s, diagonal=cast("Tensor", s.diagonal) - 1)


def solve_triangular(
    f: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    z: Tensor,
    bracket: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: tuple[Tensor, Tensor, Tensor],
    tolerance: float | None = None,
    max_steps: int | None = None,
    parallel: bool = True,
) -> Solution:
    """The root of ``f(x) = z`` for a lower triangular ``f`` with ``df_i/dx_i > 0``: Newton with a net under it.

    Args:
        f: gives its value, the slopes ``df_i/dx_i``, and the size of what it added up.
        bracket: ``(x, r) -> (low, high)`` around the root, right for a coordinate whose predecessors rest.
        start: a point, and bounds that hold for every coordinate at any time (infinite if there are none).

    Each ``|f_i(x) - z_i|`` is brought to ``tolerance`` times the largest of 1, ``|f_i|``, ``|z_i|`` and that size, and
    on to rounding for as long as steps help.
    """
    eps = torch.finfo(z.dtype).eps
    tolerance = tolerance or default_tolerance(z.dtype)
    # Newton or a halving at every second step: 2 * 70 steps take any bracket to neighbouring floats.
    limit = max_steps or 20 + 140 * z.shape[1]
    position = torch.arange(z.shape[1], device=z.device)
    x, low, high = start
    size = torch.full_like(z, torch.inf)
    stuck = torch.zeros_like(z, dtype=torch.bool)
    for step in range(1, limit + 1):
        value, slope, added = f(x)
        r = value - z
        last, size = size, r.abs()
        scale = torch.maximum(torch.maximum(value.abs(), z.abs()), added).clamp_min(1)
        met = size <= tolerance * scale
        slow = size > 0.5 * last
        settled = (size <= 2 * eps * scale) | (met & slow) | stuck
        if step == limit or bool(settled.all()):
            break
        first = settled.int().cumprod(1).sum(1, keepdim=True)  # the first coordinate that is not settled
        here, ahead = position == first, position > first
        # The brackets of later coordinates wait until their predecessors rest.
        lowest, highest = bracket(x, r)
        low = torch.where(here, torch.maximum(low, lowest), low)
        high = torch.where(here, torch.minimum(high, highest), high)
        new = x - r / slope
        outside = ~((new > low) & (new < high))
        new = torch.where((here & slow) | outside, 0.5 * low + 0.5 * high, new)
        # At neighbouring floats nothing is left to halve. The residual, reported as it is, decides.
        stuck = stuck | (here & ~((high - low > 2 * eps * x.abs()) & torch.isfinite(r)))
        # Guesses ahead of their turn may run away: start them again rather than let inf spread.
        new = torch.where(torch.isfinite(new) & (new.abs() < 1e6 * (1 + z.abs().amax())), new, start[0])
        x = torch.where(here | (ahead & parallel), new, x)
    return Solution(x, step, size.amax(1), met.all(1), slope, tolerance)


@torch.no_grad()
def solve_increasing(
    f: Callable[[Tensor], tuple[Tensor, Tensor]], z: Tensor, low: Tensor, high: Tensor, name: str
) -> Tensor:
    """The root of ``f(x) = z`` in ``[low, high]``, or `NotConverged`; ``f`` triangular and increasing, of any slope.

    ``f(x)`` gives its value and the slopes ``df_i/dx_i``; the sign of a residual narrows its bracket.

    Shapes: (batch, D); ``low`` and ``high`` likewise, and valid whatever the other coordinates are.

    >>> cube = lambda x: (x**3, 3 * x**2)
    >>> x = solve_increasing(cube, torch.tensor([[8.0]]), torch.zeros(1, 1), torch.full((1, 1), 9.0), "cube")
    >>> torch.allclose(x, torch.tensor(2.0))
    True
    """
    # A root that sits on the edge is inside, whatever way it was rounded.
    margin = 0.01 * (high - low) + 8 * default_tolerance(z.dtype) * z.abs().clamp_min(1)
    low, high = low - margin, high + margin

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = f(x)
        return value, slope, slope * x.abs().clamp_min(1)

    def bracket(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(r < 0, x, low), torch.where(r > 0, x, high)

    start = torch.minimum(torch.maximum(z, low), high), low, high
    return solve_triangular(evaluate, z, bracket, start).check("Use float64 (flow.double()).", name).x


def Bracketing(tolerance: float | None = None, max_steps: int | None = None) -> Newton:
    """The bracketed worst case on its own: one coordinate after the other.

    >>> Bracketing().parallel
    False
    """
    return Newton(tolerance, max_steps, parallel=False)


SOLVERS: dict[str, Callable[[], Solver]] = {"newton": Newton, "banach": Banach, "bracketing": Bracketing}


def _check_options(tolerance: float | None, max_steps: int | None) -> None:
    if tolerance is not None:
        check_positive("tolerance", tolerance)
    if max_steps is not None:
        check_count("max_steps", max_steps)


# The error in x, relative to max(1, |x|), above which a checked inverse is an error.
ACCURACY = {torch.float64: 1e-10, torch.float32: 1e-5}
_checking = threading.local()


@contextmanager
def unchecked() -> Iterator[None]:
    """Inverses without `conditioned`'s look at their accuracy: for draws, which no rounding of ``z`` makes less right.

    >>> with unchecked():
    ...     pass
    """
    before, _checking.off = getattr(_checking, "off", False), True
    try:
        yield
    finally:
        _checking.off = before


def conditioned(inverse: Inverse) -> Inverse:
    """Makes ``inverse(self, z, context)`` raise `NotConverged` where rounding alone moves its result too far.

    A residual at rounding level is all that a solver can reach. It says little about ``x`` where the map is flat: an
    ``x`` far away has the same ``z`` to the last bit. So the inverse is taken again at ``z`` moved by a few units in
    its last place; how far ``x`` moves is what its own rounding is worth. Only the outermost inverse looks.

    >>> @conditioned
    ... def inverse(self, z, context=None):
    ...     return 1e4 * z, z.new_zeros(len(z))
    >>> inverse(nn.Identity(), torch.zeros(1, 2))
    Traceback (most recent call last):
    quarflow.solvers.NotConverged: the inverse is too ill-conditioned for torch.float32 in 1 of 1 rows: ...
    """

    @wraps(inverse)
    def run(self: nn.Module, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        limit = ACCURACY.get(z.dtype)
        if limit is None or getattr(_checking, "off", False):
            return inverse(self, z, context)
        with unchecked():
            x, ladj = inverse(self, z, context)
            with torch.no_grad():
                signs = torch.arange(z.numel(), device=z.device).view_as(z) * 0.6180339887 % 1
                nudge = 8 * torch.finfo(z.dtype).eps * z.abs().clamp_min(1) * torch.where(signs < 0.5, -1, 1)
                moved = (inverse(self, z + nudge, context)[0] - x).abs() / x.abs().clamp_min(1)
        error = moved.flatten(1).amax(1)
        bad = ~(error <= limit)
        if bool(bad.any()):
            advice = "Use float64 (flow.double()), or" if z.dtype == torch.float32 else "Use"
            raise NotConverged(
                f"the inverse is too ill-conditioned for {z.dtype} in {int(bad.sum())} of {len(z)} rows: a change of z "
                f"in its last bits moves x by up to {error.max().item():.1e}, above {limit:.0e}. {advice} a smaller "
                "sigma or fewer blocks; quarflow.solvers.unchecked() turns this check off."
            )
        return x, ladj

    return run


def implicit(net: Network, solution: Solution, z: Tensor) -> Tensor:
    """``solution.x`` with the gradient of the exact inverse, by the implicit function theorem.

    With ``J = I + dF/dx`` at the solution and a gradient ``g`` from above, ``v = J^{-T} g`` is the gradient for ``z``
    and ``-v^T dF`` that for the parameters and the context. ``v`` solves ``v + (dF/dx)^T v = g`` by the solvers' own
    iteration on the transposed Jacobian, exact after as many steps as there are coordinates if it is triangular.

    >>> net = lambda x: (x / 2, torch.full_like(x, 0.5))
    >>> z = torch.ones(1, 1, requires_grad=True)
    >>> x = implicit(net, Newton()(net, z.detach(), 0.5), z)
    >>> torch.autograd.grad(x.sum(), z)[0]  # 1 / (1 + 1/2)
    tensor([[0.6667]])
    """
    with torch.enable_grad():
        x = solution.x.detach().requires_grad_()
        value, diagonal = net(x)
        y = z - value
        if not y.requires_grad:
            return solution.x
        slope = 0.0 if diagonal is None else diagonal.detach()

        def transposed_solve(g: Tensor) -> Tensor:
            v, tolerance = g, default_tolerance(g.dtype)
            # A triangular system is solved after D steps, a contraction after log(tol) / log(sigma).
            for _ in range(max(2000, x[0].numel() + 1)):
                (product,) = torch.autograd.grad(value, x, v, retain_graph=True)
                error = g - v - product
                if bool((error.abs().flatten(1).amax(1) <= tolerance * v.abs().flatten(1).amax(1)).all()):
                    return v
                v = v + error / (1 + slope)
            raise ArithmeticError(
                f"the gradient of an inverse did not converge: the largest error of v + (dF/dx)^T v = g is "
                f"{error.abs().max().item():.1e}. Use float64, or lower sigma."
            )

        y.register_hook(transposed_solve)
        return solution.x + (y - y.detach())


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
