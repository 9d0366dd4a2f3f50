"""``log|det(I + J)|``, ``J = dF/dx``, of a residual block: the ``logdet`` of a `Residual` transform.

================  ==================================  ============================  =========================
logdet            value                               cost, in products with ``J``  use
================  ==================================  ============================  =========================
`DiagonalLogDet`  exact, repeatable                   none beside the network's     triangular ``J``
`FullLogDet`      exact, repeatable                   D, and D^3 operations         any ``J``, small D
`SeriesLogDet`    biased, by less than                n; with the exact trace D,    small norms; to see what
                  D sigma^(n+1) / (n+1) / (1-sigma)   and n D^3 operations          truncation does
`RouletteLogDet`  unbiased, random                    4 in training, 22 in          ``||J|| < 1``, any D
                                                      evaluation, on average
================  ==================================  ============================  =========================

The last two sum ``log det(I + J) = sum_k (-1)^(k+1) tr(J^k) / k``, and estimate the trace by Hutchinson's
``tr(A) = E[v^T A v]`` over random signs ``v``. Their ``exact`` is False; `drawing` says whence they draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quarflow.checks import check_choice, check_count, check_positive, is_traced

Pullback = Callable[[Tensor], Tensor]


class DiagonalLogDet(nn.Module):
    """``sum_i log(1 + d_i)``, exact for a triangular Jacobian with diagonal ``d``.

    >>> DiagonalLogDet()(lambda x, context: (x / 2, torch.full_like(x, 0.5)), torch.zeros(1, 2))[1]
    tensor([0.8109])
    """

    exact = True

    def forward(self, net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(F(x), ladj)``."""
        value, diagonal = net(x, context)
        return value, self.from_diagonal(diagonal)

    def from_diagonal(self, diagonal: Tensor) -> Tensor:
        return torch.log1p(diagonal).flatten(1).sum(1)


def linearise(net: Callable[..., Any], x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Pullback]:
    """``F(x)`` and ``v -> v^T dF/dx``, row by row: by the network's own ``linearise``, or by reverse mode.

    ``v`` has the shape of ``x``, or one more dimension in front, for many products with the same Jacobian.

    >>> value, pullback = linearise(lambda x, context: (x.sin(), None), torch.zeros(1, 2))
    >>> pullback(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.]])
    """
    own = getattr(net, "linearise", None)
    if own is not None:
        found: tuple[Tensor, Pullback] = own(x, context)
        return found
    value, cotangents = torch.func.vjp(lambda x: net(x, context)[0], x)[:2]

    def pullback(v: Tensor) -> Tensor:
        return cotangents(v)[0] if v.ndim == x.ndim else torch.func.vmap(pullback)(v)

    return value, pullback


def jacobian(pullback: Pullback, x: Tensor) -> Tensor:
    """All rows of ``dF/dx``: (batch, D, D).

    >>> jacobian(lambda v: 2 * v, torch.zeros(1, 2))  # `pullback` as from `linearise`
    tensor([[[2., 0.],
             [0., 2.]]])
    """
    size = x.shape[1:].numel()
    basis = torch.eye(size, dtype=x.dtype, device=x.device).view(size, 1, *x.shape[1:]).expand(size, *x.shape)
    return pullback(basis).flatten(2).movedim(0, 1).to(x.dtype)


class FullLogDet(nn.Module):
    """``log|det(I + J)|`` from the whole Jacobian.

    >>> FullLogDet()(lambda x, context: (x / 2, None), torch.zeros(1, 2))[1]
    tensor([0.8109])
    """

    exact = True

    def forward(self, net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(F(x), ladj)``."""
        value, pullback = linearise(net, x, context)
        j = jacobian(pullback, x)
        return value, torch.linalg.slogdet(torch.eye(j.shape[1], dtype=j.dtype, device=j.device) + j)[1]


class Estimate(nn.Module):
    """What estimates share: ``exact = False``, and a ``generator`` of draws (None: torch's global one)."""

    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | None = None

    def noise(self, x: Tensor) -> Tensor:
        """``v``: signs, whose estimates of a trace vary less than those of normal draws."""
        signs = torch.randint(2, x.shape, dtype=x.dtype, device=x.device, generator=self.generator)
        return 2 * signs - 1


@contextmanager
def drawing(module: nn.Module, generator: torch.Generator | None) -> Iterator[None]:
    """Within it, all estimates in ``module`` draw from ``generator``, if there is one.

    >>> logdet, x = RouletteLogDet(), torch.zeros(1, 2)
    >>> def draw():
    ...     with drawing(logdet, torch.Generator().manual_seed(1)):
    ...         return logdet(lambda x, context: (x.flip(1) / 2, None), x)[1]
    >>> torch.equal(draw(), draw())
    True
    """
    estimates = [m for m in module.modules() if isinstance(m, Estimate)] if generator is not None else []
    before = [m.generator for m in estimates]
    try:
        for m in estimates:
            m.generator = generator
        yield
    finally:
        for m, g in zip(estimates, before, strict=True):
            m.generator = g


def _dot(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).flatten(1).sum(1)


def _signed(weights: Tensor, x: Tensor) -> Tensor:
    """``(-1)^k w_k`` for k = 1 .., shaped to go with the rows of ``x``."""
    signs = 1 - 2 * (torch.arange(1, len(weights) + 1, device=x.device) % 2)
    return (signs[:, None] * weights).view(*weights.shape, *[1] * (x.ndim - 1))


def power_series(pullback: Pullback, noise: Tensor, weights: Tensor) -> Tensor:
    """``sum_k w_k (-1)^(k+1) v^T J^k v / k``; ``weights`` (terms, batch or 1) -> (batch,).

    >>> power_series(lambda v: v / 2, torch.ones(1, 1), torch.ones(30, 1))  # log(1 + 1/2)
    tensor([0.4055])
    """
    total, product = torch.zeros_like(noise), noise
    for k, weight in enumerate(_signed(weights, noise), 1):
        product = pullback(product)
        total = torch.addcmul(total, weight, product, value=-1 / k)
    return _dot(total, noise)


def neumann_series(pullback: Pullback, noise: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`power_series`, and ``a = v^T (I + sum_k w_k (-1)^k J^k)``, which estimates ``v^T (I + J)^{-1}``.

    >>> neumann_series(lambda v: v / 2, torch.ones(1, 1), torch.ones(30, 1))[1]  # 1 / (1 + 1/2)
    tensor([[0.6667]])
    """
    total, cotangent, product = torch.zeros_like(noise), noise, noise
    for k, weight in enumerate(_signed(weights, noise), 1):
        product = pullback(product)
        total = torch.addcmul(total, weight, product, value=-1 / k)
        cotangent = torch.addcmul(cotangent, weight, product)
    return _dot(total, noise), cotangent


class SeriesLogDet(Estimate):
    """The first ``terms`` terms of the series: biased (Behrmann et al. 2019).

    Args:
        terms: how many.
        trace: "hutchinson", random, or "exact", from the whole Jacobian: repeatable, for small D.

    >>> SeriesLogDet(2, trace="exact")(lambda x, context: (x / 2, None), torch.zeros(1, 1))[1]  # 1/2 - 1/8
    tensor([0.3750])
    """

    def __init__(self, terms: int = 10, trace: str = "hutchinson") -> None:
        super().__init__()
        check_count("terms", terms)
        check_choice("trace", trace, ("hutchinson", "exact"))
        self.terms, self.trace = terms, trace

    def forward(self, net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(F(x), ladj)``."""
        value, pullback = linearise(net, x, context)
        if self.trace == "hutchinson":
            return value, power_series(pullback, self.noise(x), x.new_ones(self.terms, 1))
        j = jacobian(pullback, x)
        ladj, power = x.new_zeros(len(x)), j
        for k in range(1, self.terms + 1):
            ladj = ladj - (-1) ** k / k * power.diagonal(dim1=1, dim2=2).sum(1)
            power = power @ j
        return value, ladj

    def extra_repr(self) -> str:
        return f"terms={self.terms}, trace={self.trace!r}"


class RouletteLogDet(Estimate):
    """The series, stopped at random and weighted such that its mean is that of all terms (Chen et al. 2019).

        ladj = sum_{k <= n} (-1)^(k+1) v^T J^k v / (k P(n >= k)),      n = exact_terms + N

    With ``gradient="neumann"`` the gradient in training is an unbiased estimate of its own, which keeps the
    graph of one product alone and gives first derivatives only:

        d ladj = v^T (I + sum_{k <= n} (-1)^k J^k / P(n >= k)) dJ v

    With ``gradient="series"``, and in evaluation, it is the derivative of ``ladj``: the graph of n products.

    ``memory_saving`` takes the Neumann gradient in the forward pass already, so that the graph of ``F`` alone
    waits for the backward pass. For parameters it is a sum over the batch, which fits a loss where all rows
    weigh the same; for other weights the backward pass makes the graph again, with the same draws.

    The variance is finite if ``P(n >= k)`` falls more slowly than ``||J||^(2k)``: for a geometric ``N`` if
    ``rate > sigma^2 / (1 - sigma^2)``, for a Poisson ``N`` never. With norms well below 1 this is of no
    weight. Close to 1, terms that matter come once in thousands of draws, and fewer draws do not show them.

    Args:
        exact_terms: terms that are always there, in training.
        distribution: of ``N``, "poisson" or "geometric" (from 0).
        rate: mean of ``N``, in training.
        gradient: "neumann" or "series".
        memory_saving: only with "neumann".
        eval_exact_terms: ``exact_terms`` in evaluation.
        eval_rate: ``rate`` in evaluation; by default the same.
        per_row: an ``N`` for each row, so that errors are independent, at the cost of the largest; or one for
            the batch (as published).

    >>> net = lambda x, context: (x.flip(1) / 2, None)
    >>> ladj = RouletteLogDet(per_row=True)(net, torch.zeros(10000, 2))[1]
    >>> bool((ladj.mean() - torch.tensor(0.75).log()).abs() < 4 * ladj.std() / 100)
    True
    """

    def __init__(
        self,
        exact_terms: int = 2,
        distribution: str = "poisson",
        rate: float = 2.0,
        gradient: str = "neumann",
        memory_saving: bool = True,
        eval_exact_terms: int = 20,
        eval_rate: float | None = None,
        per_row: bool = False,
    ) -> None:
        super().__init__()
        check_count("exact_terms", exact_terms, least=0)
        check_choice("distribution", distribution, ("poisson", "geometric"))
        check_positive("rate", rate)
        check_choice("gradient", gradient, ("neumann", "series"))
        check_count("eval_exact_terms", eval_exact_terms, least=0)
        check_positive("eval_rate", rate if eval_rate is None else eval_rate)
        self.exact_terms, self.rate = exact_terms, rate
        self.eval_exact_terms, self.eval_rate = eval_exact_terms, rate if eval_rate is None else eval_rate
        self.distribution, self.gradient = distribution, gradient
        self.memory_saving, self.per_row = memory_saving, per_row
        self.held: Tensor | None = None  # weights to take in training, in place of a draw

    def weights(self, x: Tensor) -> Tensor:
        """`draw` for the rows of ``x``, in its dtype and on its device, or what is ``held`` in training."""
        if self.held is not None and self.training:
            return self.held
        return self.draw(len(x)).to(x.device, x.dtype)

    def draw(self, rows: int) -> Tensor:
        """A draw of ``1(n >= k) / P(n >= k)`` for ``k = 1 .. max n``: (terms, rows or 1), float64."""
        exact, rate = (self.exact_terms, self.rate) if self.training else (self.eval_exact_terms, self.eval_rate)
        # The number of terms is needed on the host: drawn there, nothing waits for the device.
        device = "cpu" if self.generator is None else self.generator.device
        mean = torch.full((max(1, rows) if self.per_row else 1,), rate, dtype=torch.float64, device=device)
        if self.distribution == "poisson":
            n = torch.poisson(mean, generator=self.generator)
        else:
            n = torch.empty_like(mean).geometric_(1 / (1 + rate), generator=self.generator) - 1
        k = torch.arange(1 - exact, int(n.max()) + 1, dtype=torch.float64, device=device)[:, None]
        if self.distribution == "poisson":
            reached = torch.special.gammainc(k.clamp_min(0), mean[:1])
        else:
            reached = (rate / (1 + rate)) ** k.clamp_min(0)
        return (k <= n) / reached

    def forward(self, net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(F(x), ladj)``."""
        weights, noise = self.weights(x), self.noise(x)
        if not self.training or self.gradient == "series":
            value, pullback = linearise(net, x, context)
            return value, power_series(pullback, noise, weights)
        parameters = list(net.parameters()) if isinstance(net, nn.Module) else []
        if self.memory_saving and torch.is_grad_enabled() and not any(map(is_traced, (x, *parameters))):
            value, ladj = _GradientInForward.apply(net, noise, weights, x, context, *parameters)
            return value, ladj
        value, pullback = linearise(net, x, context)
        with torch.no_grad():
            ladj, cotangent = neumann_series(pullback, noise, weights)
        if torch.is_grad_enabled():
            slope = _dot(pullback(cotangent), noise)
            ladj = ladj + (slope - slope.detach())
        return value, ladj

    def extra_repr(self) -> str:
        return (
            f"exact_terms={self.exact_terms}, distribution={self.distribution!r}, rate={self.rate}, "
            f"gradient={self.gradient!r}, memory_saving={self.memory_saving}, "
            f"eval_exact_terms={self.eval_exact_terms}, eval_rate={self.eval_rate}, per_row={self.per_row}"
        )


class _GradientInForward(torch.autograd.Function):
    """``(F(x), ladj)`` with the Neumann gradient of ``ladj`` taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        net: nn.Module,
        noise: Tensor,
        weights: Tensor,
        x: Tensor,
        context: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.net, ctx.noise = net, noise
        ctx.x, ctx.context = (t if t is None else t.detach().requires_grad_(t.requires_grad) for t in (x, context))
        ctx.inputs = [t for t in (ctx.x, ctx.context, *parameters) if t is not None and t.requires_grad]
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.enable_grad():
            ctx.value, pullback = linearise(net, ctx.x, ctx.context)
        ladj, ctx.cotangent = neumann_series(pullback, noise, weights)
        if ctx.inputs:
            with torch.enable_grad():
                slope = _dot(pullback(ctx.cotangent), noise).sum()
            ctx.gradients = torch.autograd.grad(slope, ctx.inputs, retain_graph=True, materialize_grads=True)
        return ctx.value.detach(), ladj

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_value: Tensor, g_ladj: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            if bool((g_ladj == g_ladj[:1]).all()):
                outputs, incoming, known = [ctx.value], [g_value], ctx.gradients
            else:
                # Parameters' gradients were summed over the batch: that sum cannot be weighted row by row.
                with torch.autocast(*ctx.autocast):
                    value, pullback = linearise(ctx.net, ctx.x, ctx.context)
                    outputs = [value, _dot(pullback(ctx.cotangent), ctx.noise)]
                incoming, known = [g_value, g_ladj], None
            found = torch.autograd.grad(outputs, ctx.inputs, incoming, retain_graph=True, materialize_grads=True)
        if known is not None:
            found = torch._foreach_add(found, torch._foreach_mul(known, g_ladj[:1].sum()))
        each = iter(found)
        return None, None, None, *(next(each) if needed else None for needed in ctx.needs_input_grad[3:])
