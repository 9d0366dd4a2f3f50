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

    def complete(self, z: Tensor, known: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``z`` (n, *event) where ``known`` (broadcasts to it), and draws of the rest given that.

        These are draws of ``p`` unless a base, whose coordinates depend on each other, says otherwise.
        """
        return torch.where(known, z, self.sample(len(z), generator))

    def _noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        return torch.randn(
            n, *self.event_shape, dtype=self.anchor.dtype, device=self.anchor.device, generator=generator
        )

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.event_shape))


class Ordered(Base):
    """A base by the conditional density of each coordinate given those before: `log_prob` is the sum of `log_terms`."""

    @abstractmethod
    def log_terms(self, z: Tensor) -> Tensor:
        """``log p(z_i | z_<i)``: (batch, *event) -> (batch, *event)."""

    def normal_scores(self, z: Tensor) -> Tensor:
        """Each coordinate on the scale of a normal: ``Phi^-1(P(z'_i <= z_i | z_<i))``, of the shape of ``z``.

        >>> StudentT((1,), freedom=3.0).normal_scores(torch.tensor([[-1.5], [0.0], [1.5]]))
        tensor([[-1.1989],
                [-0.0000],
                [ 1.1989]])
        """
        raise NotImplementedError(f"{type(self).__name__} must define normal_scores(z) for this.")

    def log_prob(self, z: Tensor) -> Tensor:
        return self.log_terms(z).flatten(1).sum(1)


class Independent(Ordered):
    """A base of independent coordinates: `log_terms` gives the log-density of each.

    >>> Normal((2,)).log_terms(torch.zeros(1, 2))
    tensor([[-0.9189, -0.9189]])
    """


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
        self.raw_freedom = nn.Parameter(torch.full(self.event_shape, _raw(freedom)))

    @property
    def freedom(self) -> Tensor:
        """``nu``, (*event)."""
        return 1 + softplus(self.raw_freedom)

    def log_terms(self, z: Tensor) -> Tensor:
        nu = self.freedom
        constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * (nu * math.pi).log()
        return constant - (nu + 1) / 2 * torch.log1p(z.square() / nu)

    def normal_scores(self, z: Tensor) -> Tensor:
        return _student_scores(z, self.freedom)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        half = (self.freedom / 2).expand(n, *self.event_shape)
        return self._noise(n, generator) * (half / _gamma(half, generator)).sqrt()


class JointStudentT(Ordered):
    """The multivariate Student t, with learnable degrees of freedom ``nu > 1``: all coordinates are large together.

    ``z = normal * sqrt(nu / chi2_nu)``, one ``chi2`` for a row. Given ``k`` coordinates with sum of squares ``q``, the
    rest are one of ``nu + k`` degrees of freedom, times ``sqrt((nu + q) / (nu + k))``.

    >>> base = JointStudentT((2,), freedom=5.0)
    >>> one, both = base.log_terms(torch.tensor([[0.0, 3.0], [4.0, 3.0]]))[:, 1]
    >>> bool(both > one)  # behind a large one a large one surprises less
    True
    """

    def __init__(self, event_shape: Sequence[int], freedom: float = 10.0) -> None:
        super().__init__(event_shape)
        self.raw_freedom = nn.Parameter(torch.tensor(_raw(freedom)))

    @property
    def freedom(self) -> Tensor:
        """``nu``, ()."""
        return 1 + softplus(self.raw_freedom)

    def log_terms(self, z: Tensor) -> Tensor:
        nu, spread = self._given_before(z)
        constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * (math.pi * spread).log()
        return (constant - (nu + 1) / 2 * torch.log1p(z.flatten(1).square() / spread)).view_as(z)

    def normal_scores(self, z: Tensor) -> Tensor:
        nu, spread = self._given_before(z)
        return _student_scores(z.flatten(1) * (nu / spread).sqrt(), nu).view_as(z)

    def _given_before(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Of each coordinate given those before: degrees of freedom, and these times the square of its scale."""
        squares = z.square().flatten(1)
        nu = self.freedom + torch.arange(squares.shape[1], dtype=z.dtype, device=z.device)
        return nu, self.freedom + squares.cumsum(1) - squares

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        nothing = self.anchor.new_zeros(n, *self.event_shape)
        return self.complete(nothing, torch.zeros_like(nothing[:1], dtype=torch.bool), generator)

    def complete(self, z: Tensor, known: Tensor, generator: torch.Generator | None = None) -> Tensor:
        known = known.expand_as(z)
        q, k = (part.flatten(1).sum(1) for part in (torch.where(known, z, 0).square(), known))
        gamma = _gamma((self.freedom + k) / 2, generator)
        scale = ((self.freedom + q) / 2 / gamma).sqrt().view(-1, *(1 for _ in self.event_shape))
        return torch.where(known, z, scale * self._noise(len(z), generator))


def _student_scores(z: Tensor, freedom: Tensor) -> Tensor:
    from scipy.special import stdtr  # comes with scikit-learn

    # From the lower tail, which keeps its digits.
    below = stdtr(freedom.detach().cpu().double().numpy(), -z.detach().abs().cpu().double().numpy())
    return -z.sign() * torch.special.ndtri(torch.as_tensor(below)).to(z)


def _raw(freedom: float) -> float:
    """``softplus(raw) = freedom - 1``, without overflow for large freedom."""
    check_positive("freedom", freedom - 1)
    return (freedom - 1) + math.log(-math.expm1(1 - freedom))


def _gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    # torch's gamma draws carry their implicit gradient, but take no generator of their own.
    return torch._standard_gamma(shape) if generator is None else torch._standard_gamma(shape, generator=generator)


BASES: dict[str, type[Base]] = {
    "normal": Normal,
    "location-scale": LocationScale,
    "student": StudentT,
    "joint-student": JointStudentT,
}


def base(name: str, event_shape: Sequence[int]) -> Base:
    """A new base distribution by its name in `BASES`.

    >>> base("normal", (3,))
    Normal(3)
    """
    check_choice("base", name, BASES)
    return BASES[name](event_shape)
