"""`Flow`: a transform and a base distribution make a density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quarflow.bases import Base, Ordered
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
        self.notes: dict[str, Any] = {}  # JSON of how it was fitted; goes into its file

    gaps: bool = False  # whether `log_prob` takes rows with NaN, for values that are missing

    @property
    def exact(self) -> bool:
        """Whether ``log_prob`` is exact, not an estimate."""
        return self.transform.exact

    @property
    def triangular(self) -> bool:
        """Whether ``z_i`` depends on ``x_<=i`` alone, from end to end: what the methods for prefixes need."""
        independent = isinstance(self.base, Ordered) and len(self.event_shape) == 1
        return independent and self.transform.triangular

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
        check_tensor("x", x, tuple(self.event_shape), self.base.anchor, self.gaps)
        batch = x.shape[: x.ndim - len(self.event_shape)]
        rows = x.reshape(-1, *self.event_shape)
        c = self._context_rows(context, batch)
        with drawing(self, generator):
            out = self(rows, c)
        self._check_density(out, rows, c)
        return out.view(batch)

    def _check_density(self, out: Tensor, x: Tensor, context: Tensor | None) -> None:
        if not is_traced(out) and bool(torch.isnan(out).any()):
            failed = int(torch.isnan(out).view(len(x), -1).any(1).sum())
            raise FloatingPointError(f"log_prob is NaN in {failed} rows: {self.diagnose(x, context)}")

    def log_prob_terms(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p(x_i | x_<i, context)`` of the first k columns, exact: (..., k) -> (..., k), for any k up to all.

        Needs a `triangular` flow: ``quar``, ``maf``, ``iaf`` or ``bnaf`` with ``mixing=None``. The terms of all columns
        add up to `log_prob`.

        >>> import quarflow as qf
        >>> flow = qf.models.quar(features=3, blocks=2, hidden=(8,), mixing=None)
        >>> x = torch.randn(5, 3)
        >>> bool(torch.allclose(flow.log_prob_terms(x).sum(-1), flow.log_prob(x), atol=1e-5))
        True
        """
        self._check_triangular()
        check_tensor("x", x, (self._columns("x", x),), self.base.anchor)
        batch, k = x.shape[:-1], x.shape[-1]
        c = self._context_rows(context, batch)
        rows = self._filled(x.reshape(-1, k), c)
        z, slopes = self.transform.log_slopes(rows, c)
        out = (cast("Ordered", self.base).log_terms(z) + slopes)[:, :k]
        self._check_density(out, rows, c)
        return out.view(x.shape)

    def prefix_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p(x_1 .. x_k | context)``, the later columns integrated out, exactly: (..., k) -> (...).

        Needs a `triangular` flow, as `log_prob_terms` does.

        >>> import quarflow as qf
        >>> flow = qf.models.quar(features=3, blocks=2, hidden=(8,), mixing=None)
        >>> flow.prefix_log_prob(torch.randn(5, 2)).shape
        torch.Size([5])
        """
        return self.log_prob_terms(x, context).sum(-1)

    def conditional_log_prob(self, x: Tensor, given: Tensor, context: Tensor | None = None) -> Tensor:
        """``log p(x | given, context)``, exact: ``x`` the columns that follow those ``given``, (..., m) -> (...).

        ``given`` (..., k) is one row for all, or a row for each of ``x``. Columns behind ``k + m`` are integrated out.
        Needs a `triangular` flow, as `log_prob_terms` does.

        >>> import quarflow as qf
        >>> flow = qf.models.quar(features=3, blocks=2, hidden=(8,), mixing=None)
        >>> flow.conditional_log_prob(torch.randn(5, 2), given=torch.zeros(1)).shape
        torch.Size([5])
        """
        self._check_triangular()
        given, k = self._given(given)
        check_tensor("x", x, (self._columns("x", x, spare=k),), self.base.anchor)
        before = self._rows("given", given, k, x.shape[:-1]).view(*x.shape[:-1], k)
        return self.log_prob_terms(torch.cat([before, x], -1), context)[..., k:].sum(-1)

    @torch.no_grad()
    def sample_given(
        self, n: int, given: Tensor, context: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``n`` exact draws of the later columns given the first k, behind these: (n, features), without gradient.

        ``given`` (..., k) is one row for all, or ``n`` rows; it comes back as it is. Needs a `triangular` flow, as
        `log_prob_terms` does.

        >>> import quarflow as qf
        >>> flow = qf.models.quar(features=3, blocks=2, hidden=(8,), mixing=None)
        >>> flow.sample_given(5, given=torch.tensor([1.0, 2.0]))[:, :2].unique(dim=0)
        tensor([[1., 2.]])
        """
        self._check_triangular()
        check_count("n", n)
        given, k = self._given(given)
        c = self._context_rows(context, (n,))
        x = self._filled(self._rows("given", given, k, (n,)), c)
        known = (torch.arange(x.shape[1], device=x.device) < k)[None]
        x = self._complete(x, known, c, generator)
        if not bool(torch.isfinite(x).all()):
            raise FloatingPointError(f"sample_given gave NaN or inf: {self.diagnose(x, c)}")
        return x

    def _complete(
        self, x: Tensor, known: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """``x`` (batch, *event) where ``known`` (1, *event), the first of one order, and draws of the rest given it."""
        z = self.transform(x, context)[0]
        z = self.base.complete(z, self.transform.places(known), generator)
        with unchecked():
            return self.transform.inverse_given(z, x, known, context)

    def _filled(self, x: Tensor, context: Tensor | None) -> Tensor:
        """``x`` (batch, k), and behind it columns in the flow's domain, on which nothing before them depends."""
        k, d = x.shape[1], self.event_shape[0]
        if k == d:
            return x
        with torch.no_grad(), unchecked():
            centre = self.transform.inverse(x.new_zeros(1, d), None if context is None else context[:1])[0]
        return torch.cat([x, centre[:, k:].expand(len(x), -1)], 1)

    def _columns(self, name: str, x: object, spare: int = 0) -> int:
        """The number of columns of ``x``, at most all but ``spare``; whether ``x`` is a tensor is for others to say."""
        k, most = x.shape[-1] if isinstance(x, Tensor) and x.ndim else 0, self.event_shape[0] - spare
        if isinstance(x, Tensor) and not 1 <= k <= most:
            raise ValueError(
                f"{name}: expected from 1 to {most} columns, in the order of the flow's {self.event_shape[0]}; got "
                f"shape {tuple(x.shape)}."
            )
        return k

    def _given(self, given: Tensor) -> tuple[Tensor, int]:
        k = self._columns("given", given, spare=1)
        given = given[None] if isinstance(given, Tensor) and given.ndim == 1 else given
        check_tensor("given", given, (k,), self.base.anchor)
        return given, k

    def _check_triangular(self) -> None:
        if self.triangular:
            return
        if len(self.event_shape) != 1:
            raise ValueError("flow: expected one of vectors; this one is of images. See quarflow.pixels.complete.")
        wrong = [f"transform {i} ({type(t).__name__})" for i, t in enumerate(self._steps) if not t.triangular]
        raise ValueError(
            f"flow: expected a triangular one, with all columns in one order from end to end; "
            f"{', '.join(wrong[:3]) or f'the base ({type(self.base).__name__})'} mixes them. Train a model that "
            "keeps them in order, such as models.quar(..., mixing=None) or models.maf(..., mixing=None)."
        )

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
        return None if context is None else self._rows("context", context, self.context_features, batch)

    def _rows(self, name: str, x: Tensor, columns: int, batch: Sequence[int]) -> Tensor:
        """``x`` as a row for each data point of ``batch``: (n, columns)."""
        rows, n = x.reshape(-1, columns), torch.Size(batch).numel()
        if len(rows) == 1:
            return rows.expand(n, -1)
        if len(rows) != n:
            raise ValueError(
                f"{name}: expected 1 row or {n}, one for each data point; got {len(rows)}. "
                f"Use {name}.repeat_interleave(...) to pair them."
            )
        return rows

    @property
    def _steps(self) -> list[Transform]:
        return self.transform.steps if isinstance(self.transform, Chain) else [self.transform]

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
        for i, step in enumerate(self._steps):
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
