"""Coupling layers: half of the coordinates stay, and say what happens to the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from quarflow.checks import check_choice, check_count, check_positive
from quarflow.nn.conditioners import ConvConditioner, board, colours, normalising
from quarflow.nn.masked import MaskedMLP, soft_clip
from quarflow.solvers import conditioned, follow, solve_increasing
from quarflow.transforms.base import Transform

SPLITS = ("half", "checkerboard")


class Coupling(Transform):
    """``z_a = x_a,  z_b = T(x_b; h(x_a))``, ``T`` increasing in each coordinate; ``ladj = sum log T'``.

    ``x_a`` is the first half, ``D // 2``, of the coordinates of a vector or of the channels of an image. A flow of
    couplings needs mixing between them, or ``x_a`` is never changed. To add a coupling, write `change` and `restore`.

    Args:
        features: coordinates of a vector, or channels of an image.
        context: number of context features, 0 for none.
        hidden, activation: of the network ``h`` of vectors.
        net: another ``h``: ``net(x_a, context)`` of shape (batch, *shape of x_b, outputs). For images (batch, C, H, W)
            those of `quarflow.nn.conditioners`; their context is an argument of theirs.
        split: ``"half"``, or ``"checkerboard"``: ``x_a`` is one colour of the pixels of an image, of half its width.
        swap: ``x_a`` is the second half, or the other colour.
    """

    outputs: int

    def __init__(
        self,
        features: int,
        context: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        net: nn.Module | None = None,
        split: str = "half",
        swap: bool = False,
    ) -> None:
        super().__init__()
        check_count("features", features)
        check_choice("split", split, SPLITS)
        self.kind, self.swap = split, swap
        if split == "checkerboard":
            if net is None:
                raise ValueError("net: expected a network of images, as a checkerboard has pixels; got none.")
            self.net = net
            return
        if features < 2:
            raise ValueError(
                f"features: coupling needs at least 2 features, one that stays and one that changes; got {features}. "
                "Use an autoregressive or a residual transform."
            )
        stay = features // 2
        self.sizes = [stay, features - stay]
        # Every input has rank 0 and every target rank 1: all is read, nothing masked.
        ranks = torch.zeros(stay, dtype=torch.int64), torch.ones(features - stay, dtype=torch.int64)
        self.net = MaskedMLP(*ranks, self.outputs, hidden, context, activation) if net is None else net

    @abstractmethod
    def change(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """``T(x)`` and ``log T'(x)``, both of the shape of ``x``; ``h`` (*shape, outputs) comes from the network."""

    @abstractmethod
    def restore(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` such that ``T(x) = z``, and ``-log T'(x)``."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(x_a, x_b)``."""
        if self.kind == "checkerboard":
            first, second = colours(x)
        else:
            first, second = x.split(self.sizes[::-1] if self.swap else self.sizes, 1)
        return (second, first) if self.swap else (first, second)

    def join(self, stay: Tensor, change: Tensor) -> Tensor:
        """The whole of its two parts."""
        parts = (change, stay) if self.swap else (stay, change)
        return board(*parts) if self.kind == "checkerboard" else torch.cat(parts, 1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = self.split(x)
        z, log_slope = self.change(change, self.net(stay, context))
        return self.join(stay, z), log_slope.flatten(1).sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stay, change = self.split(z)
        x, log_slope = self.restore(change, self.net(stay, context))
        return self.join(stay, x), log_slope.flatten(1).sum(1)

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        with normalising(self.net):
            return self.forward(x, context)[0]

    def extra_repr(self) -> str:
        parts = "a checkerboard" if self.kind == "checkerboard" else f"{self.sizes[0]} stay, {self.sizes[1]} change"
        return parts + (", swapped" if self.swap else "")


class AdditiveCoupling(Coupling):
    """``z_a = x_a,  z_b = x_b + t(x_a)``; ``ladj = 0`` (NICE, Dinh et al. 2014, arXiv:1410.8516).

    >>> AdditiveCoupling(2, hidden=(8,))(torch.zeros(1, 2))[1]
    tensor([0.])
    """

    outputs = 1

    def change(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x + h[..., 0], torch.zeros_like(x)

    def restore(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return z - h[..., 0], torch.zeros_like(z)


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
        net: nn.Module | None = None,
        split: str = "half",
        swap: bool = False,
    ) -> None:
        super().__init__(features, context, hidden, activation, net, split, swap)
        check_positive("limit", limit)
        self.limit = limit

    def change(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        t, a = h.unbind(-1)
        s = soft_clip(a, self.limit)
        return x * s.exp() + t, s

    def restore(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        t, a = h.unbind(-1)
        s = soft_clip(a, self.limit)
        return (z - t) * (-s).exp(), -s


class LearnedPrior(AffineCoupling):
    """What `MultiScale` finishes, given what goes on: ``z_b = x_b exp(s(x_a)) + t(x_a)`` by one 3x3 convolution.

    Behind it the finished channels ``z_b``, the first half, are standard normal, which is to say that they were normal
    with a learned mean and deviation given ``x_a``: the split of Glow (Kingma & Dhariwal 2018). To be put at the end of
    a scale.

    Shapes: (batch, C, H, W) -> (batch, C, H, W).

    >>> LearnedPrior(4)(torch.ones(1, 4, 2, 2))[1]
    tensor([0.], grad_fn=<SumBackward1>)
    """

    def __init__(self, channels: int, context: int = 0, limit: float = 7.0) -> None:
        check_count("channels", channels, least=2)
        stay = channels // 2
        net = ConvConditioner(stay, channels - stay, self.outputs, hidden=(), context=context)
        super().__init__(channels, limit=limit, net=net, swap=True)


def mixture_logit(x: Tensor, log_weights: Tensor, means: Tensor, log_scales: Tensor) -> tuple[Tensor, Tensor]:
    """``y = log(F / (1 - F))`` of a mixture of logistics ``F(x)``, and ``log dy/dx``.

    Shapes: ``x`` (...), the parameters of the components (..., components).

    >>> one = torch.zeros(1, 1)
    >>> mixture_logit(torch.tensor([3.0]), one, one, one)  # of a single logistic: the identity
    (tensor([3.]), tensor([0.]))
    """
    u = (x[..., None] - means) * (-log_scales).exp()
    below, above = logsigmoid(u), logsigmoid(-u)
    log_cdf = torch.logsumexp(log_weights + below, -1)
    log_tail = torch.logsumexp(log_weights + above, -1)
    log_density = torch.logsumexp(log_weights + below + above - log_scales, -1)
    return log_cdf - log_tail, log_density - log_cdf - log_tail


def mixture_logit_root(y: Tensor, log_weights: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
    """``x`` such that ``mixture_logit(x) = y``, to rounding, or `NotConverged`; with gradients of the exact root.

    Each component alone has its root at ``m_k + exp(s_k) y``: the least and the greatest of these bracket that of the
    mixture.

    >>> parameters = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[-3.0, 3.0]]), torch.zeros(1, 2)
    >>> mixture_logit_root(torch.tensor([0.0]), *parameters).abs() < 1e-5
    tensor([True])
    """
    parameters = [p.flatten(0, -2) for p in (log_weights, means, log_scales)]
    target = y.flatten()
    with torch.no_grad():
        roots = torch.addcmul(parameters[1], parameters[2].exp(), target[:, None])

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            value, log_slope = mixture_logit(x[:, 0], *parameters)
            return value[:, None], log_slope.exp()[:, None]

        # Each value is an equation of its own: a row.
        low, high = roots.amin(1, keepdim=True), roots.amax(1, keepdim=True)
        x = solve_increasing(f, target[:, None], low, high, "a mixture coupling")
    if torch.is_grad_enabled():
        value, log_slope = mixture_logit(x[:, 0], *parameters)
        x = follow(x, (value - target)[:, None], log_slope.exp()[:, None, None])
    return x.view(y.shape)


class MixtureCoupling(Coupling):
    """``z_a = x_a,  z_b = exp(s) logit F(x_b) + t``, ``F`` the distribution function of a mixture of logistics.

    The coupling of Flow++ (Ho et al. 2019, arXiv:1902.00275): weights, means and scales of the components, ``s`` and
    ``t`` are functions of ``x_a``. ``s = tanh(a)``, and the logarithms of the scales are within ``(-limit, limit)``.
    ``ladj = sum s + log f - log F - log(1 - F)``, exact. The inverse is by numbers, each value in its bracket, to
    rounding; its gradients are those of the exact inverse.

    >>> step = MixtureCoupling(3, hidden=(8,), components=4)
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(step.inverse(step(x)[0])[0], x, atol=1e-4))
    True
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        components: int = 8,
        limit: float = 7.0,
        net: nn.Module | None = None,
        split: str = "half",
        swap: bool = False,
    ) -> None:
        check_count("components", components)
        check_positive("limit", limit)
        self.outputs = self.outputs_of(components)
        super().__init__(features, context, hidden, activation, net, split, swap)
        self.limit = limit

    @staticmethod
    def outputs_of(components: int) -> int:
        """Numbers that the network gives for each value: ``s``, ``t``, and three for each component."""
        return 2 + 3 * components

    def parameters_of(self, h: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """``s``, ``t``, and logarithms of the weights, means and logarithms of the scales of the components."""
        weights, means, scales = h[..., 2:].chunk(3, -1)
        mixture = weights.log_softmax(-1), means, soft_clip(scales, self.limit)
        return h[..., 0].tanh(), h[..., 1], mixture

    def change(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        s, t, mixture = self.parameters_of(h)
        y, log_slope = mixture_logit(x, *mixture)
        return y * s.exp() + t, s + log_slope

    def restore(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        s, t, mixture = self.parameters_of(h)
        x = mixture_logit_root((z - t) * (-s).exp(), *mixture)
        return x, -s - mixture_logit(x, *mixture)[1]

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().inverse(z, context)
