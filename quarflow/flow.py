"""`Flow`: a transform and a base distribution make a density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quarflow.bases import Base
from quarflow.checks import check_context, check_count, check_finite, check_tensor, is_traced
from quarflow.logdet import drawing
from quarflow.solvers import unchecked
from quarflow.transforms.base import Chain, Transform

if TYPE_CHECKING:
    from quarflow.models import ModelConfig


class Flow(nn.Module):
    """``log p(x | c) = log p_base(f(x; c)) + log|det df/dx|``.

    `forward` is the bare log density of a (batch, *event) tensor: what a training loop calls. `log_prob` is the same
    with its input checked, any leading batch shape, and an error that names the cause if a NaN comes out.

    Args:
        transform: ``f``, data to noise.
        base: the distribution of ``z = f(x)``.
        context_features: size of the conditioning vector, 0 for none.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=2, hidden=(8,))
    >>> flow.log_prob(torch.zeros(3, 2)).shape, flow.sample(5).shape
    (torch.Size([3]), torch.Size([5, 2]))
    """

    def __init__(self, transform: Transform, base: Base, context_features: int = 0) -> None:
        super().__init__()
        check_count("context_features", context_features, least=0)
        self.transform = transform
        self.base = base
        self.context_features = context_features
        self.config: ModelConfig | None = None

    @property
    def exact(self) -> bool:
        """Whether ``log_prob`` is exact, not an estimate."""
        return self.transform.exact

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one data point."""
        return self.base.event_shape

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p(x | context)``: (batch, *event) -> (batch,), unchecked."""
        z, ladj = self.transform(x, context)
        return self.base.log_prob(z) + ladj

    def log_prob(
        self, x: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``log p(x | context)`` in nats: (..., *event) -> (...).

        One context row goes with all data, or as many rows as there are data points. Where the flow is not
        `exact` this is an estimate, drawn from ``generator`` or else from torch's global one.
        """
        check_tensor("x", x, tuple(self.event_shape), self.base.anchor)
        batch = x.shape[: x.ndim - len(self.event_shape)]
        rows = x.reshape(-1, *self.event_shape)
        c = self._context_rows(context, batch)
        with drawing(self, generator):
            out = self(rows, c)
        if not is_traced(out) and bool(torch.isnan(out).any()):
            raise FloatingPointError(f"log_prob is NaN in {int(torch.isnan(out).sum())} rows: {self.diagnose(rows, c)}")
        return out.view(batch)

    @torch.no_grad()
    def log_prob_with_error(
        self,
        x: Tensor,
        context: Tensor | None = None,
        draws: int = 16,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard error of ``draws`` estimates of ``log p(x | context)``, each (...); no gradient.

        The error is zero where ``log_prob`` is repeatable, and does not show the bias of a truncated series.

        >>> import quarflow as qf
        >>> flow = qf.models.residual(features=2, blocks=1, hidden=(8,))
        >>> [t.shape for t in flow.log_prob_with_error(torch.zeros(3, 2), draws=2)]
        [torch.Size([3]), torch.Size([3])]
        """
        check_count("draws", draws, least=2)
        all_draws = torch.stack([self.log_prob(x, context, generator) for _ in range(draws)])
        return all_draws.mean(0), all_draws.std(0) / draws**0.5

    def sample(
        self, n: int, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``n`` draws, (n, *event), without gradient; ``context`` is one row for all, or ``n`` rows."""
        with torch.no_grad():
            return self.rsample(n, context, generator)

    def rsample(
        self, n: int, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """`sample` with gradients with respect to parameters and context (implicit through numerical inverses)."""
        return self._draw(n, context, generator)[0]

    @torch.no_grad()
    def sample_and_log_prob(
        self, n: int, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """``n`` draws and their log density, from one pass: (n, *event), (n,)."""
        return self._draw(n, context, generator)

    def _draw(
        self, n: int, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        check_count("n", n)
        c = self._context_rows(context, (n,))
        z = self.base.sample(n, generator)
        with unchecked(), drawing(self, generator):
            x, ladj = self.transform.inverse(z, c)
        if not bool(torch.isfinite(x).all()):
            raise FloatingPointError(
                f"sample gave NaN or inf in {int((~torch.isfinite(x)).flatten(1).any(1).sum())} of {n} rows: "
                f"{self.diagnose(x, c)}"
            )
        return x, self.base.log_prob(z) - ladj

    def distribution(self, context: Tensor | None = None) -> torch.distributions.Distribution:
        """The density as a ``torch.distributions.Distribution``; its batch shape is that of the context.

        >>> import quarflow as qf
        >>> d = qf.models.quar(features=2, context=1, blocks=1, hidden=(4,)).distribution(torch.zeros(3, 1))
        >>> d.batch_shape, d.event_shape, d.sample((5,)).shape
        (torch.Size([3]), torch.Size([2]), torch.Size([5, 3, 2]))
        """
        if context is not None and context.ndim == 1 and self.context_features:
            check_context(context[None], self.context_features, self.base.anchor)
        else:
            check_context(context, self.context_features, self.base.anchor)
        return FlowDistribution(self, context)

    def initialise(self, x: Tensor, context: Tensor | None = None) -> Flow:
        """Set actnorm and standardising layers from data ``x``, and return the flow. `fit` does this first."""
        check_tensor("x", x, tuple(self.event_shape), self.base.anchor)
        rows = x.reshape(-1, *self.event_shape)
        self.transform.initialise(rows, self._context_rows(context, x.shape[: x.ndim - len(self.event_shape)]))
        return self

    def varying(self, x: Tensor) -> Tensor:
        """``x`` (n, *event), which `fit` refuses if a column of it is constant: it has no density."""
        return x

    def _context_rows(self, context: Tensor | None, batch: Sequence[int]) -> Tensor | None:
        if context is not None and context.ndim == 1 and self.context_features:
            context = context[None]
        check_context(context, self.context_features, self.base.anchor)
        if context is None:
            return None
        rows = context.reshape(-1, self.context_features)
        n = torch.Size(batch).numel()
        if len(rows) == 1:
            return rows.expand(n, -1)
        if len(rows) != n:
            raise ValueError(
                f"context: expected 1 row or {n}, one for each data point; got {len(rows)}. "
                "Use context.repeat_interleave(...) to pair them."
            )
        return rows

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Tensor | None = None) -> str:
        """Where the first value that is not finite comes from: a parameter, the data, or a transform.

        >>> import quarflow as qf
        >>> qf.models.quar(features=2, blocks=1, hidden=(4,)).diagnose(torch.zeros(1, 2))
        'every parameter, transform and log-density is finite here.'
        """
        for name, p in [*self.named_parameters(), *self.named_buffers()]:
            if p.is_floating_point() and not bool(torch.isfinite(p).all()):
                return f"{name} holds NaN or inf. Train with a lower learning rate, or load a good file."
        try:
            check_finite("x", x, len(self.event_shape))
        except ValueError as error:
            return str(error)
        steps = self.transform.steps if isinstance(self.transform, Chain) else [self.transform]
        for i, step in enumerate(steps):
            largest = x.abs().max().item()
            x, ladj = step(x, context)
            if not bool(torch.isfinite(x).all() & torch.isfinite(ladj).all()):
                return (
                    f"transform {i} ({type(step).__name__}) turns finite values, the largest {largest:.1e}, into NaN "
                    "or inf. Rescale the data, keep it in the transform's domain, or use float64."
                )
        if not bool(torch.isfinite(self.base.log_prob(x)).all()):
            return f"the base density overflows at values of up to {x.abs().max().item():.1e}. Rescale the data."
        return "every parameter, transform and log-density is finite here."


class FlowDistribution(torch.distributions.Distribution):
    """A `Flow` at a given context, with the interface of ``torch.distributions``; made by `Flow.distribution`."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (the base class's own declaration)
    has_rsample = True

    def __init__(self, flow: Flow, context: Tensor | None) -> None:
        self.flow, self.context = flow, context
        batch = torch.Size() if context is None else context.shape[:-1]
        super().__init__(batch, flow.event_shape, validate_args=False)

    @property
    def support(self) -> torch.distributions.constraints.Constraint:
        return torch.distributions.constraints.independent(
            torch.distributions.constraints.real, len(self.event_shape)
        )

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> FlowDistribution:
        new = self._get_checked_instance(FlowDistribution, _instance)
        new.flow = self.flow
        new.context = None if self.context is None else self.context.expand(*batch_shape, -1)
        super(FlowDistribution, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        return new

    def log_prob(self, x: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(x.shape[: x.ndim - len(self.event_shape)], self.batch_shape)
        x = x.expand(*batch, *self.event_shape)
        single = not batch
        x = x[None] if single else x
        c = None if self.context is None else self.context.expand(*(batch or (1,)), -1)
        out = self.flow.log_prob(x, c)
        return out[0] if single else out

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        batch = shape[: len(shape) - len(self.event_shape)]
        c = None if self.context is None else self.context.expand(*batch, -1).reshape(-1, self.context.shape[-1])
        return self.flow.rsample(batch.numel(), c).view(shape)
