"""Densities that are known: samples, exact log-density and entropy, to hold a learned density against.

All parameters are kept in float64. ``log_prob`` computes in the dtype and on the device of its input.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Generator, Tensor


class Toy(ABC):
    """A known density ``p`` over ``features`` coordinates.

    A new one sets ``features``, gives ``_sample(n, generator)``, float64 rows of shape ``(n, features)``, and
    ``_log_prob(x)``, ``(batch, features)`` to ``(batch,)``, and is added to ``TOYS`` where it has a default.

    >>> EightGaussians().features
    2
    """

    features: int = 2

    @abstractmethod
    def _sample(self, n: int, generator: Generator | None) -> Tensor: ...

    @abstractmethod
    def _log_prob(self, x: Tensor) -> Tensor: ...

    def sample(
        self, n: int, generator: Generator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """``x ~ p``, shape ``(n, features)``, on the CPU.

        Drawn in float64, then cast (to torch's default dtype if none is given): one generator state gives the
        same points in every dtype.

        >>> a, b = (Moons().sample(3, torch.Generator().manual_seed(1)) for _ in range(2))
        >>> a.shape, torch.equal(a, b)
        (torch.Size([3, 2]), True)
        """
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be a positive integer, the number of points to draw; got {n!r}")
        return self._sample(n, generator).to(dtype or torch.get_default_dtype())

    def log_prob(self, x: Tensor) -> Tensor:
        """``log p(x)`` in nats, ``(..., features)`` to ``(...)``; ``-inf`` outside the support.

        >>> Checkerboard().log_prob(torch.tensor([[1.0, 1.0], [1.0, 3.0]]))
        tensor([-3.4657,    -inf])
        """
        if not (torch.is_tensor(x) and x.is_floating_point()):
            came = x.dtype if torch.is_tensor(x) else type(x).__name__
            raise ValueError(f"x must be a floating point tensor; got {came}: convert it, e.g. x.float()")
        if x.ndim == 0 or x.shape[-1] != self.features:
            raise ValueError(
                f"x must have {self.features} features in its last dimension; got shape {tuple(x.shape)}: "
                f"reshape it to (..., {self.features})"
            )
        return self._log_prob(x.reshape(-1, self.features)).reshape(x.shape[:-1])

    def entropy(self, n: int = 100_000, generator: Generator | None = None) -> tuple[float, float]:
        """``-E log p(x)`` in nats, the best negative log-likelihood of any model, and its standard error.

        The mean over ``n`` draws, repeatable: without a generator, one with seed 0 is used. Where the
        integral has a closed form it is that one, with standard error 0.

        >>> nats, standard_error = EightGaussians().entropy(2000)
        >>> abs(nats - 2.8316) < 5 * standard_error
        True
        """
        if not isinstance(n, int) or n < 2:
            raise ValueError(f"n must be an integer of at least 2, the number of draws; got {n!r}")
        x = self.sample(n, generator or torch.Generator().manual_seed(0), torch.float64)
        # In pieces: the mixtures compare every point with every component.
        nats = -torch.cat([self._log_prob(piece) for piece in x.split(1024)])
        return nats.mean().item(), nats.std().item() / math.sqrt(n)


class GaussianMixture(Toy):
    """``p(x) = sum_k w_k N(x; m_k, C_k)``: ``means`` is ``(k, features)``.

    Give either ``covariances``, anything that broadcasts to ``(k, features, features)``, or ``scale``, one
    standard deviation for every component and coordinate. ``weights`` ``(k,)`` are normalised; equal without.

    >>> p = GaussianMixture([[-1.0], [1.0]], scale=0.5, weights=[1, 3])
    >>> p.log_prob(torch.tensor([[1.0]])).exp()
    tensor([0.5985])
    """

    def __init__(
        self,
        means: Tensor | Sequence[Sequence[float]],
        covariances: Tensor | Sequence[Sequence[float]] | None = None,
        weights: Tensor | Sequence[float] | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        self.means = torch.as_tensor(means, dtype=torch.float64)
        if self.means.ndim != 2 or self.means.numel() == 0:
            raise ValueError(f"means must have shape (components, features); got {tuple(self.means.shape)}")
        k, self.features = self.means.shape

        if (covariances is None) == (scale is None):
            raise ValueError(
                "covariances and scale exclude each other and one is needed; "
                f"got {'neither' if scale is None else 'both'}"
            )
        if scale is not None:
            if not 0 < scale < math.inf:
                raise ValueError(f"scale must be a positive standard deviation; got {scale!r}")
            covariances = scale**2 * torch.eye(self.features, dtype=torch.float64)
        matrices = torch.as_tensor(covariances, dtype=torch.float64)
        shape = (k, self.features, self.features)
        if matrices.ndim not in (2, 3) or matrices.shape != shape[-matrices.ndim :]:
            raise ValueError(
                f"covariances must have shape {shape} or {shape[1:]}; got {tuple(matrices.shape)}"
            )
        factors, failed = torch.linalg.cholesky_ex(matrices)
        if failed.any() or not torch.allclose(matrices, matrices.mT):
            raise ValueError("covariances must be symmetric and positive definite; at least one is not")
        self.factors = factors.expand(shape)

        w = torch.as_tensor([1] * k if weights is None else weights, dtype=torch.float64)
        if w.shape != (k,) or not bool((w >= 0).all() and 0 < w.sum() < math.inf):
            raise ValueError(
                f"weights must be {k} non-negative numbers, one per component, of positive sum; got {weights}"
            )
        self.weights = w / w.sum()

        # log N(x; m, C) = sum_i log W_ii - |W x - W m|^2 / 2 - features / 2 log 2 pi,  W the inverse factor.
        eye = torch.eye(self.features, dtype=torch.float64)
        self._whiten = torch.linalg.solve_triangular(factors, eye, upper=False).expand(shape)
        self._white_means = torch.einsum("kij,kj->ki", self._whiten, self.means)
        log_diagonal = self._whiten.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self._constant = self.weights.log() + log_diagonal - self.features / 2 * math.log(2 * math.pi)

    def _sample(self, n: int, generator: Generator | None) -> Tensor:
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        noise = torch.randn(n, self.features, dtype=torch.float64, generator=generator)
        x = self.means[k]
        # One component at a time: gathering a factor for every row would take n * features^2 numbers.
        for i in k.unique():
            x[k == i] += noise[k == i] @ self.factors[i].mT
        return x

    def _log_prob(self, x: Tensor) -> Tensor:
        white = torch.einsum("kij,nj->nki", self._whiten.to(x), x) - self._white_means.to(x)
        return (self._constant.to(x) - white.square().sum(-1) / 2).logsumexp(-1)


class EightGaussians(GaussianMixture):
    """Eight equal round Gaussians on a circle: radius ``4 / sqrt 2``, standard deviation ``0.5 / sqrt 2``.

    The ``8gaussians`` of FFJORD and Residual Flows: radius 4 and standard deviation 0.5, then all is divided
    by ``sqrt 2`` (there written 1.414). Neighbours overlap a little: the entropy is 2.8316 nats, not quite
    the ``log 8 + log(2 pi e / 8) = 2.8379`` of modes far apart.

    >>> EightGaussians().means[0]
    tensor([2.8284, 0.0000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        angle = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
        super().__init__(4 / math.sqrt(2) * _circle(angle), scale=0.5 / math.sqrt(2))


class Moons(GaussianMixture):
    """Two interleaved half circles of radius 2 with Gaussian noise of standard deviation 0.2.

    scikit-learn's ``make_moons(noise=0.1)``, times 2, minus (1, 0.2), as in FFJORD. Each half circle is a row
    of 128 Gaussians, a quarter of their standard deviation apart, so that the density is a finite sum.

    >>> len(Moons().means)
    256
    """

    def __init__(self) -> None:
        upper = _circle(math.pi * _midpoints(128))
        lower = torch.tensor([1, 0.5], dtype=torch.float64) - upper
        shift = torch.tensor([1, 0.2], dtype=torch.float64)
        super().__init__(2 * torch.cat([upper, lower]) - shift, scale=0.2)


class Spirals(GaussianMixture):
    """Two arms ``+-(-t cos t, t sin t) / 3``, ``0 < t < 3 pi`` of density ``~ t``, and noise of 0.1.

    The ``2spirals`` of FFJORD without its small uniform jitter. Each arm is a row of 320 Gaussians, at most
    their standard deviation apart, so that the density is a finite sum.

    >>> Spirals().log_prob(torch.tensor([[0.0, 1.57], [0.0, 1.05]]))
    tensor([ -2.0257, -13.6643])
    """

    def __init__(self) -> None:
        t = 3 * math.pi * _midpoints(320)
        arm = t[:, None] * _circle(t) * torch.tensor([-1, 1], dtype=torch.float64) / 3
        super().__init__(torch.cat([arm, -arm]), weights=torch.cat([t, t]), scale=0.1)


class Rings(Toy):
    """Four equal circles of radius 3, 2.25, 1.5 and 0.75 around the origin, with Gaussian noise ``s = 0.08``.

    The ``rings`` of Residual Flows with a uniform angle. With ``rho = |x|``, one circle of radius ``r`` has

        ``p(x) = exp(-(rho^2 + r^2) / 2 s^2) I_0(rho r / s^2) / (2 pi s^2)``

    >>> Rings().log_prob(torch.tensor([[3.0, 0.0], [2.6, 0.0]]))
    tensor([ -2.7159, -12.0256])
    """

    radii = torch.tensor([3, 2.25, 1.5, 0.75], dtype=torch.float64)
    noise = 0.08

    def _sample(self, n: int, generator: Generator | None) -> Tensor:
        r = self.radii[torch.randint(len(self.radii), (n,), generator=generator)]
        angle = 2 * math.pi * torch.rand(n, dtype=torch.float64, generator=generator)
        noise = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        return r[:, None] * _circle(angle) + self.noise * noise

    def _log_prob(self, x: Tensor) -> Tensor:
        rho, r = torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.radii.to(x)
        variance = self.noise**2
        # i0e(k) = exp(-k) I_0(k) keeps the large exponents together in (rho - r)^2.
        log_ring = -((rho - r) ** 2) / (2 * variance) + torch.special.i0e(rho * r / variance).log()
        return log_ring.logsumexp(-1) - math.log(len(r) * 2 * math.pi * variance)


class Checkerboard(Toy):
    """Uniform on the eight squares of side 2 in ``[-4, 4)^2`` with ``floor(x_1 / 2) + floor(x_2 / 2)`` even.

    The ``checkerboard`` of Residual Flows. Entropy ``log 32``.

    >>> Checkerboard().entropy()
    (3.4657359027997265, 0.0)
    """

    def _sample(self, n: int, generator: Generator | None) -> Tensor:
        # Of four rows (columns) of squares, choose one; of its two live squares, choose one.
        row, column = torch.randint(4, (n,), generator=generator), torch.randint(2, (n,), generator=generator)
        corner = torch.stack([row, 2 * column + row % 2], -1) * 2 - 4
        return corner + 2 * torch.rand(n, 2, dtype=torch.float64, generator=generator)

    def _log_prob(self, x: Tensor) -> Tensor:
        inside = ((x >= -4) & (x < 4)).all(-1) & ((x / 2).floor().sum(-1) % 2 == 0)
        return torch.full_like(x[:, 0], -math.log(32)).masked_fill(~inside, -math.inf)

    def entropy(self, n: int = 100_000, generator: Generator | None = None) -> tuple[float, float]:
        """``log 32``, exactly; the arguments are not used."""
        return math.log(32), 0.0


class TwoUniforms(Toy):
    """In one dimension ``p = weight U(first) + (1 - weight) U(second)``, each interval a pair (low, high).

    >>> TwoUniforms().log_prob(torch.tensor([[-1.5], [0.0], [1.5]])).exp()
    tensor([0.5000, 0.0000, 0.5000])
    >>> TwoUniforms(first=(0, 1), second=(0.5, 1.5)).entropy()
    (0.34657359027997264, 0.0)
    """

    features = 1

    def __init__(
        self,
        first: tuple[float, float] = (-2, -1),
        second: tuple[float, float] = (1, 2),
        weight: float = 0.5,
    ) -> None:
        for name, (low, high) in (("first", first), ("second", second)):
            if not -math.inf < low < high < math.inf:
                raise ValueError(f"{name} must be an interval (low, high) with low < high; got {(low, high)}")
        if not 0 <= weight <= 1:
            raise ValueError(f"weight must lie in [0, 1], the probability of first; got {weight!r}")
        self.low = torch.tensor([first[0], second[0]], dtype=torch.float64)
        self.high = torch.tensor([first[1], second[1]], dtype=torch.float64)
        self.weights = torch.tensor([weight, 1 - weight], dtype=torch.float64)

    def _sample(self, n: int, generator: Generator | None) -> Tensor:
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        u = torch.rand(n, dtype=torch.float64, generator=generator)
        return torch.lerp(self.low[k], self.high[k], u)[:, None]

    def _log_prob(self, x: Tensor) -> Tensor:
        low, high = self.low.to(x), self.high.to(x)
        height = self.weights.to(x) / (high - low)
        return torch.where((x >= low) & (x < high), height, 0.0).sum(-1).log()

    def entropy(self, n: int = 100_000, generator: Generator | None = None) -> tuple[float, float]:
        """Exact, since ``p`` is constant between the ends of the intervals; the arguments are not used."""
        ends = torch.cat([self.low, self.high]).sort().values
        p = self._log_prob((ends[1:] + ends[:-1])[:, None] / 2).exp()
        return -(ends.diff() * torch.special.xlogy(p, p)).sum().item(), 0.0


TOYS: dict[str, type[Toy]] = {
    "eight_gaussians": EightGaussians,
    "moons": Moons,
    "spirals": Spirals,
    "rings": Rings,
    "checkerboard": Checkerboard,
    "two_uniforms": TwoUniforms,
}


def toy(name: str) -> Toy:
    """The density of that name, with its default parameters.

    >>> toy("rings").sample(4).shape
    torch.Size([4, 2])
    """
    if name not in TOYS:
        raise ValueError(f"name must be one of {', '.join(TOYS)}; got {name!r}")
    return TOYS[name]()


def mixture_of_gaussians(features: int, components: int = 8, seed: int = 0) -> GaussianMixture:
    """A random mixture of equal weights, the same for the same arguments: ground truth of any dimension.

    Means from ``N(0, 4 I)``; covariances ``Q diag(s^2) Q^T`` with a random rotation ``Q`` and ``s``
    log-uniform in [1/4, 1].

    >>> mixture_of_gaussians(features=20).sample(3).shape
    torch.Size([3, 20])
    """
    for name, value in (("features", features), ("components", components)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value!r}")
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(components, features, dtype=torch.float64, generator=generator)
    normal = torch.randn(components, features, features, dtype=torch.float64, generator=generator)
    s = 4 ** -torch.rand(components, 1, features, dtype=torch.float64, generator=generator)
    root = torch.linalg.qr(normal).Q * s
    return GaussianMixture(means, root @ root.mT)


def _circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _midpoints(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n
