"""Base distributions of a flow: where ``z`` lives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from quarflow.checks import check_choice, check_positive


class Base(nn.Module, ABC):
    """``log p(z)`` of shape (batch,) for ``z`` of shape (batch, *event), and draws from ``p``.

    Draws are differentiable functions of the parameters.

    >>> base = Normal((2,))
    >>> isinstance(base, Base), base.sample(3).shape
    (True, torch.Size([3, 2]))
    """

    anchor: Tensor

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__()
        self.event_shape = torch.Size(event_shape)
        # Follows the flow's dtype and device, which a base without parameters could not tell otherwise.
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """``log p(z)``: (batch, *event) -> (batch,)."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """``n`` independent draws, (n, *event)."""

    def _noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        return torch.randn(
            n, *self.event_shape, dtype=self.anchor.dtype, device=self.anchor.device, generator=generator
        )

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.event_shape))


class Independent(Base):
    """A base of independent coordinates: `log_terms` gives the log-density of each, `log_prob` their sum.

    >>> Normal((2,)).log_terms(torch.zeros(1, 2))
    tensor([[-0.9189, -0.9189]])
    """

    @abstractmethod
    def log_terms(self, z: Tensor) -> Tensor:
        """``log p(z_i)``: (batch, *event) -> (batch, *event)."""

    def normal_scores(self, z: Tensor) -> Tensor:
        """Each coordinate on the scale of a normal: ``Phi^-1(P(z'_i <= z_i))``, (batch, *event) -> (batch, *event).

        >>> StudentT((1,), freedom=3.0).normal_scores(torch.tensor([[-1.5], [0.0], [1.5]]))
        tensor([[-1.1989],
                [-0.0000],
                [ 1.1989]])
        """
        raise NotImplementedError(f"{type(self).__name__} must define normal_scores(z) for this.")

    def log_prob(self, z: Tensor) -> Tensor:
        return self.log_terms(z).flatten(1).sum(1)


class Normal(Independent):
    """``N(0, 1)`` in every coordinate.

    >>> Normal((2,)).log_prob(torch.zeros(1, 2))
    tensor([-1.8379])
    """

    def log_terms(self, z: Tensor) -> Tensor:
        return -0.5 * (z.square() + math.log(2 * math.pi))

    def normal_scores(self, z: Tensor) -> Tensor:
        return z

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._noise(n, generator)


class LocationScale(Independent):
    """``N(m_i, exp(s_i)^2)`` with learnable ``m`` and ``s``.

    >>> LocationScale((2,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__(event_shape)
        self.location = nn.Parameter(torch.zeros(self.event_shape))
        self.log_scale = nn.Parameter(torch.zeros(self.event_shape))

    def log_terms(self, z: Tensor) -> Tensor:
        u = (z - self.location) * (-self.log_scale).exp()
        return -0.5 * (u.square() + math.log(2 * math.pi)) - self.log_scale

    def normal_scores(self, z: Tensor) -> Tensor:
        return (z - self.location) * (-self.log_scale).exp()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.location + self.log_scale.exp() * self._noise(n, generator)


class StudentT(Independent):
    """Student t in every coordinate, with learnable degrees of freedom ``nu_i > 1``, for heavy tails.

    >>> StudentT((2,), freedom=5.0).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """

    def __init__(self, event_shape: Sequence[int], freedom: float = 10.0) -> None:
        super().__init__(event_shape)
        check_positive("freedom", freedom - 1)
        # softplus(raw) = freedom - 1, without overflow for large freedom.
        raw = (freedom - 1) + math.log(-math.expm1(1 - freedom))
        self.raw_freedom = nn.Parameter(torch.full(self.event_shape, raw))

    @property
    def freedom(self) -> Tensor:
        """``nu``, (*event)."""
        return 1 + softplus(self.raw_freedom)

    def log_terms(self, z: Tensor) -> Tensor:
        nu = self.freedom
        constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * (nu * math.pi).log()
        return constant - (nu + 1) / 2 * torch.log1p(z.square() / nu)

    def normal_scores(self, z: Tensor) -> Tensor:
        from scipy.special import stdtr  # comes with scikit-learn

        # From the lower tail, which keeps its digits.
        below = stdtr(self.freedom.detach().cpu().double().numpy(), -z.detach().abs().cpu().double().numpy())
        return -z.sign() * torch.special.ndtri(torch.as_tensor(below)).to(z)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        # normal / sqrt(gamma): torch's gamma draws carry their implicit gradient, but take no generator of their own.
        half = (self.freedom / 2).expand(n, *self.event_shape)
        if generator is None:
            return self._noise(n, generator) * (half / torch._standard_gamma(half)).sqrt()
        return self._noise(n, generator) * (half / torch._standard_gamma(half, generator=generator)).sqrt()


BASES: dict[str, type[Base]] = {"normal": Normal, "location-scale": LocationScale, "student": StudentT}


def base(name: str, event_shape: Sequence[int]) -> Base:
    """A new base distribution by its name in `BASES`.

    >>> base("normal", (3,))
    Normal(3)
    """
    check_choice("base", name, BASES)
    return BASES[name](event_shape)
