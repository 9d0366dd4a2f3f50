"""Neighbours: quarflow's transforms in ``torch.distributions`` and in zuko, its flows in sbi, and zuko's in quarflow.

================  ==========================================================================================
`to_torch`        a `Transform` as a ``torch.distributions`` transform
`to_zuko`         a `Transform` as a lazy transform, for ``zuko.flows.Flow([...], base)``
`from_zuko`       a zuko flow (NAF, CNF, NSF, ...) as a `Flow`, for `quarflow.fit` and `quarflow.evaluate`
`to_sbi`          a model as a density estimator of sbi, for ``sbi.inference.NPE(prior, density_estimator=...)``
================  ==========================================================================================

zuko is imported by `to_zuko` and `from_zuko`, and sbi by what `to_sbi` gives, not before: zuko's import changes torch's
settings for distributions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions import transforms as torch_transforms

from quarflow import models
from quarflow.bases import Base
from quarflow.checks import check_choice, check_count
from quarflow.flow import Flow
from quarflow.transforms.base import Chain, Transform
from quarflow.transforms.elementwise import Standardise

if TYPE_CHECKING:
    import zuko


class TorchTransform(torch_transforms.Transform):
    """What `to_torch` gives. Batch dimensions of ``x`` and of the context are broadcast, and may be none at all."""

    bijective = True

    def __init__(
        self, transform: Transform, context: Tensor | None = None, event_dims: int = 1, cache_size: int = 0
    ) -> None:
        super().__init__(cache_size)
        self.transform, self.context, self.event_dims = transform, context, event_dims
        self.domain = self.codomain = constraints.independent(constraints.real, event_dims)
        self._ladj: Tensor | None = None  # of the cached pair

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(y, log|det dy/dx|)``, from one evaluation."""
        if self._cache_size == 0:
            return self._rows(self.transform.forward, x)
        y = self(x)
        return y, self.log_abs_det_jacobian(x, y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        if self._ladj is not None:
            cached_x, cached_y = self._cached_x_y
            if x is cached_x and y is cached_y:
                return self._ladj
        return self._rows(self.transform.forward, x)[1]

    @property
    def inv(self) -> torch_transforms.Transform:
        if self._inv is None:
            self._inv = _TorchInverse(self)
        return self._inv

    def with_cache(self, cache_size: int = 1) -> TorchTransform:
        if self._cache_size == cache_size:
            return self
        return TorchTransform(self.transform, self.context, self.event_dims, cache_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transform})"

    def _call(self, x: Tensor) -> Tensor:
        y, ladj = self._rows(self.transform.forward, x)
        self._ladj = ladj if self._cache_size else None
        return y

    def _inverse(self, y: Tensor) -> Tensor:
        x, ladj = self._rows(self.transform.inverse, y)
        self._ladj = -ladj if self._cache_size else None
        return x

    def _rows(self, f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """``f(x, context)`` for any leading batch shape."""
        split = x.ndim - self.event_dims
        batch, event, c = x.shape[:split], x.shape[split:], self.context
        if c is not None:
            batch = torch.broadcast_shapes(batch, c.shape[:-1])
            c = c.expand(*batch, c.shape[-1]).reshape(-1, c.shape[-1])
        y, ladj = f(x.expand(*batch, *event).reshape(-1, *event), c)
        return y.reshape(*batch, *y.shape[1:]), ladj.reshape(batch)


class _TorchInverse(torch_transforms._InverseTransform):
    """torch's inverse, with `call_and_ladj` from one evaluation."""

    def call_and_ladj(self, y: Tensor) -> tuple[Tensor, Tensor]:
        transform: Any = self._inv
        if transform._cache_size == 0:
            return transform._rows(transform.transform.inverse, y)
        x = self(y)
        return x, self.log_abs_det_jacobian(y, x)


def to_torch(
    transform: Transform, context: Tensor | None = None, event_dims: int = 1, cache_size: int = 0
) -> TorchTransform:
    """``transform`` at a given context as a ``torch.distributions`` transform, data to noise; ``.inv`` is the way back.

    With ``cache_size=1`` the last pair and its log-determinant are kept, as torch's transforms keep their last pair: a
    log density then takes one evaluation, and that of a draw none. Parameters must not change in between.

    Args:
        transform: the transform; its parameters stay those of the module.
        context: (..., context features), or None.
        event_dims: trailing dimensions of one data point: 1 for vectors, 3 for images.
        cache_size: 0 or 1.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=1, hidden=(4,))
    >>> noise = torch.distributions.Normal(torch.zeros(2), 1.0)
    >>> d = torch.distributions.TransformedDistribution(noise, to_torch(flow.transform, cache_size=1).inv)
    >>> x = torch.randn(3, 2)
    >>> torch.allclose(d.log_prob(x), flow.log_prob(x), atol=1e-5)
    True
    """
    _check_transform(transform)
    check_count("event_dims", event_dims)
    if context is not None and (not isinstance(context, Tensor) or context.ndim == 0):
        raise ValueError(f"context: expected a tensor (..., context features) or None; got {context!r}.")
    return TorchTransform(transform, context, event_dims, cache_size)


def to_zuko(transform: Transform, event_dims: int = 1) -> zuko.lazy.LazyTransform:
    """``transform`` as a lazy transform of zuko: a module that, called with a context, gives `to_torch` of it.

    In ``zuko.flows.Flow`` it goes next to zuko's own; like zuko's, it is data to noise. A transform made without
    context leaves the flow's context alone.

    >>> import zuko
    >>> from quarflow.nn.triangular import TriangularNet
    >>> from quarflow.transforms import Residual
    >>> block = to_zuko(Residual(TriangularNet(2, hidden=(8,), context=3)))
    >>> noise = zuko.lazy.UnconditionalDistribution(
    ...     zuko.distributions.DiagNormal, torch.zeros(2), torch.ones(2), buffer=True)
    >>> flow = zuko.flows.Flow([block, zuko.flows.MaskedAutoregressiveTransform(2, 3)], noise)
    >>> flow(torch.zeros(3)).sample((5,)).shape
    torch.Size([5, 2])
    """
    _check_transform(transform)
    check_count("event_dims", event_dims)
    return _zuko_transform()(transform, event_dims)


@functools.cache
def _zuko_transform() -> Any:
    """The class of what `to_zuko` gives; its base class exists once zuko is imported."""
    LazyTransform = _import_zuko().lazy.LazyTransform

    class ZukoTransform(LazyTransform):  # type: ignore[misc, valid-type]
        def __init__(self, transform: Transform, event_dims: int = 1) -> None:
            super().__init__()
            self.transform, self.event_dims = transform, event_dims

        def forward(self, c: Tensor | None = None) -> TorchTransform:
            return TorchTransform(self.transform, c, self.event_dims)

    ZukoTransform.__qualname__ = "ZukoTransform"  # where pickle finds it: `__getattr__` below
    return ZukoTransform


def __getattr__(name: str) -> Any:
    if name == "ZukoTransform":
        return _zuko_transform()
    if name == "SbiEstimator":
        return _sbi_estimator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def from_zuko(flow: zuko.flows.Flow, features: int, context: int = 0, standardise: bool = False) -> Flow:
    """A zuko flow as a `Flow`, with the same parameters: `quarflow.fit`, `quarflow.evaluate` and draws work on it.

    Its inverses are zuko's, with zuko's accuracy: several are by bisection to about 1e-6.

    Args:
        flow: a ``zuko.flows.Flow``, such as ``zuko.flows.NSF(features, context)``, whose base ignores the context.
        features: number of coordinates that it was made for.
        context: number of context features that it was made for.
        standardise: whether `quarflow.fit` puts the moments of the data in front of it, as our own models have them.

    >>> import zuko
    >>> flow = from_zuko(zuko.flows.NSF(2, 3, hidden_features=(8,)), features=2, context=3)
    >>> flow.log_prob(torch.zeros(5, 2), torch.zeros(5, 3)).shape, flow.sample(4, torch.zeros(3)).shape
    (torch.Size([5]), torch.Size([4, 2]))
    """
    lazy = _import_zuko().lazy
    if not isinstance(flow, lazy.Flow):
        raise ValueError(f"flow: expected a zuko.flows.Flow, with a transform and a base; got {type(flow).__name__}.")
    if not isinstance(flow.base, lazy.UnconditionalDistribution):
        raise ValueError(
            f"flow: expected a base that ignores the context, a zuko.lazy.UnconditionalDistribution; got "
            f"{type(flow.base).__name__}. Put what depends on the context into the transforms."
        )
    check_count("features", features)
    check_count("context", context, least=0)
    base = _ZukoBase(flow.base, features, flow)
    steps: Transform = _ZukoSteps(flow.transform, context > 0)
    if standardise:
        steps = Chain([Standardise(features).to(base.anchor), steps])
    return Flow(steps, base, context)


class _ZukoSteps(Transform):
    """A lazy transform of zuko as a `Transform`."""

    def __init__(self, lazy: nn.Module, conditional: bool) -> None:
        super().__init__()
        self.lazy, self.conditional = lazy, conditional

    @property
    def exact(self) -> bool:  # type: ignore[override]
        # The continuous flow's trace may be an estimate.
        return all(getattr(module, "exact", True) for module in self.lazy.modules())

    def _at(self, context: Tensor | None) -> Any:
        return self.lazy(context if self.conditional else None)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, ladj = self._at(context).call_and_ladj(x)
        return z, ladj.flatten(1).sum(1) if ladj.ndim > 1 else ladj

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, ladj = self._at(context).inv.call_and_ladj(z)
        return x, ladj.flatten(1).sum(1) if ladj.ndim > 1 else ladj


class _ZukoBase(Base):
    """An unconditional distribution of zuko as a `Base`."""

    def __init__(self, lazy: nn.Module, features: int, flow: nn.Module) -> None:
        super().__init__((features,))
        d = lazy()
        if d.batch_shape + d.event_shape != self.event_shape:
            raise ValueError(
                f"features: expected {(d.batch_shape + d.event_shape).numel()}, as the flow has; got {features}."
            )
        self.lazy = lazy
        like = next(t for t in [*flow.parameters(), *flow.buffers(), self.anchor] if t.is_floating_point())
        self.to(like.device, like.dtype)

    def log_prob(self, z: Tensor) -> Tensor:
        log_prob = self.lazy().log_prob(z)
        return log_prob.flatten(1).sum(1) if log_prob.ndim > 1 else log_prob

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        d = self.lazy()
        draw = d.rsample if d.has_rsample else d.sample
        if generator is None:
            return draw((n,))
        # zuko draws from torch's global generator: lend it a seed.
        devices = [self.anchor.device] if self.anchor.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            return draw((n,))


def to_sbi(
    model: str | Callable[..., Flow] = "quar", embedding: nn.Module | None = None, **options: Any
) -> Callable[[Tensor, Tensor], Any]:
    """What sbi takes as ``density_estimator``: from parameters and simulations to a flow of the first given the second.

    The flow starts from the moments of the parameters, and sees simulations (n, features) by theirs.

    Args:
        model: a name in `quarflow.models`, or a function that makes a flow from ``(features, context, **options)``.
        embedding: a network from simulations (n, ...) to what the flow sees of them, (n, features), trained with it.
        **options: those of the model.

    >>> estimator = to_sbi("maf", blocks=1, hidden=(8,))(torch.randn(10, 2), torch.randn(10, 3))
    >>> estimator.sample((4,), torch.randn(1, 3)).shape
    torch.Size([4, 1, 2])
    """
    if isinstance(model, str):
        check_choice("model", model, models.REGISTRY)
    if embedding is not None and not isinstance(embedding, nn.Module):
        raise ValueError(f"embedding: expected a torch.nn.Module; got {type(embedding).__name__}.")

    def build(theta: Tensor, x: Tensor) -> Any:
        make = getattr(models, model) if isinstance(model, str) else model
        return _sbi_estimator()(theta, x, make, embedding, options)

    return build


@functools.cache
def _sbi_estimator() -> Any:
    """The class of what `to_sbi` builds; its base class exists once sbi is imported."""
    try:
        from sbi.neural_nets.estimators import ConditionalDensityEstimator
    except ImportError as error:
        raise ImportError("sbi is not installed. Use pip install 'quarflow[sbi]'.") from error

    class SbiEstimator(ConditionalDensityEstimator):
        """``log p(input | condition)`` by a `Flow`, in sbi's shapes: (sample, batch, ...) and (batch, ...)."""

        def __init__(
            self,
            input: Tensor,
            condition: Tensor,
            make: Callable[..., Flow],
            embedding: nn.Module | None,
            options: dict[str, Any],
        ) -> None:
            steps: list[nn.Module] = []
            if condition.ndim == 2:
                scale = Standardise(condition.shape[1]).to(condition)
                scale.initialise(condition)
                steps.append(_First(scale))
            steps += [] if embedding is None else [embedding]
            embed = nn.Sequential(*steps)
            with torch.no_grad():
                context = embed(condition)
            if input.ndim != 2 or context.ndim != 2:
                raise ValueError(
                    f"theta, x: expected vectors, (n, features); got {tuple(input.shape)} and {tuple(context.shape)}. "
                    "Give to_sbi an embedding that turns x into vectors."
                )
            flow = make(features=input.shape[1], context=context.shape[1], **options).to(input)
            super().__init__(flow.initialise(input, context), input.shape[1:], condition.shape[1:])
            self.embed = embed

        @property
        def embedding_net(self) -> nn.Module:
            return self.embed

        def log_prob(self, input: Tensor, condition: Tensor, **kwargs: Any) -> Tensor:
            input = input[None] if input.ndim == 2 else input
            context = self._context(condition)
            batch = torch.broadcast_shapes(input.shape[:2], context.shape[:2])
            return self.net.log_prob(input.expand(*batch, -1), context.expand(*batch, -1))

        def loss(self, input: Tensor, condition: Tensor, **kwargs: Any) -> Tensor:
            return -self.log_prob(input, condition)[0]

        def sample(self, sample_shape: torch.Size, condition: Tensor, **kwargs: Any) -> Tensor:
            return self.sample_and_log_prob(sample_shape, condition)[0]

        def sample_and_log_prob(
            self, sample_shape: torch.Size, condition: Tensor, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            context = self._context(condition)[0]
            shape = torch.Size([*sample_shape, len(context)])
            rows = context.expand(*shape, -1).reshape(shape.numel(), -1)
            samples, log_prob = self.net.sample_and_log_prob(shape.numel(), rows)
            return samples.view(*shape, -1), log_prob.view(shape)

        def _context(self, condition: Tensor) -> Tensor:
            """What the flow sees of conditions ([sample,] batch, ...): (sample or 1, batch, features)."""
            self._check_condition_shape(condition)
            batch = condition.shape[: condition.ndim - len(self.condition_shape)]
            context = self.embed(condition.reshape(-1, *self.condition_shape))
            return context.view(*(1,) * (2 - len(batch)), *batch, -1)

    SbiEstimator.__qualname__ = "SbiEstimator"  # where pickle finds it: `__getattr__` above
    return SbiEstimator


class _First(nn.Module):
    """A transform's value, without its log-determinant."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x)[0]


def _check_transform(transform: object) -> None:
    if not isinstance(transform, Transform):
        raise ValueError(
            f"transform: expected a quarflow Transform, such as flow.transform; got {type(transform).__name__}."
        )


def _import_zuko() -> Any:
    try:
        import zuko.flows
    except ImportError as error:
        raise ImportError("zuko is not installed. Use pip install 'quarflow[zuko]'.") from error
    return zuko
