"""Maps that act on each coordinate alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from quarflow.checks import check_choice, check_count
from quarflow.transforms.base import Transform


def _shape(features: int | Sequence[int]) -> tuple[int, ...]:
    shape = tuple(features) if isinstance(features, Sequence) else (features,)
    for n in shape:
        check_count("features", n)
    return shape


def moments(x: Tensor, shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation over the batch; an error where a deviation is zero or there is nothing to measure.

    With a ``shape`` of (C, 1, 1) they are those of channels, over all pixels.
    """
    if len(x) < 2:
        raise ValueError(f"x: expected at least 2 rows to initialise {name} from; got {len(x)}. Pass more data.")
    rows = x.movedim(1, -1).flatten(0, -2) if shape[1:] == (1,) * (x.ndim - 2) else x
    mean, deviation = rows.mean(0).view(shape), rows.std(0).view(shape)
    # A constant column leaves a deviation of rounding size, not always exactly zero.
    constant = deviation <= 4 * torch.finfo(x.dtype).eps * mean.abs()
    if bool((constant | ~torch.isfinite(deviation)).any()):
        columns = (constant | ~torch.isfinite(deviation)).flatten().nonzero().flatten().tolist()
        raise ValueError(
            f"x: expected columns that vary, to initialise {name} from; columns {columns[:10]} are constant in these "
            f"{len(x)} rows, or overflow {x.dtype}. Drop them, or rescale the data."
        )
    return mean, deviation


class Affine(Transform):
    """``z = exp(a) x + b`` with learnable ``a`` and ``b``, linear in the context if there is one.

    Shapes: (batch, *features) -> (batch, *features). With features (C, 1, 1) images (batch, C, H, W) of any size have
    a scale and a shift for each channel.

    >>> Affine(2)(torch.ones(1, 2))
    (tensor([[1., 1.]], grad_fn=<AddcmulBackward0>), tensor([0.], grad_fn=<ExpandBackward0>))
    """

    triangular = True

    def __init__(self, features: int | Sequence[int], context: int = 0) -> None:
        super().__init__()
        self.shape = _shape(features)
        check_count("context", context, least=0)
        self.log_scale = nn.Parameter(torch.zeros(self.shape))
        self.shift = nn.Parameter(torch.zeros(self.shape))
        # Starts at zero: the map is the one without context until the data ask for another.
        self.context = nn.Parameter(torch.zeros(2 * self.shift.numel(), context)) if context else None

    def parameters_at(self, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(a, b)``, of shape (*features) or, with context, (batch, *features)."""
        if self.context is None or context is None:
            return self.log_scale, self.shift
        with torch.autocast(context.device.type, enabled=False):
            a, b = (context @ self.context.mT).chunk(2, dim=1)
        return self.log_scale + a.reshape(-1, *self.shape), self.shift + b.reshape(-1, *self.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        a, b = self.parameters_at(context)
        return torch.addcmul(b, a.exp(), x), self._total(a, x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        a, b = self.parameters_at(context)
        return (z - b) * (-a).exp(), -self._total(a, z)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.forward(x, context)[0], self.parameters_at(context)[0].expand_as(x)

    def _total(self, a: Tensor, x: Tensor) -> Tensor:
        total = a.flatten(1).sum(1) if a.ndim > len(self.shape) else a.sum().expand(x.shape[0])
        places = x.shape[1:].numel() // self.shift.numel()  # at which each scale acts
        return total if places == 1 else places * total

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape)) + ("" if self.context is None else f", context={self.context.shape[1]}")


class ActNorm(Affine):
    """An `Affine` that `initialise` sets such that its outputs have mean 0 and deviation 1 (Kingma & Dhariwal 2018).

    >>> t = ActNorm(1)
    >>> t.initialise(torch.tensor([[1.0], [3.0]])).flatten()
    tensor([-0.7071,  0.7071])
    """

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        mean, deviation = moments(x, self.shape, "ActNorm")
        self.log_scale.copy_(-deviation.log())
        self.shift.copy_(-mean / deviation)
        return self.forward(x, context)[0]


class Standardise(Transform):
    """``z = (x - mean) / deviation`` with the fixed moments of the data seen by `initialise`.

    >>> t = Standardise(1)
    >>> t.initialise(torch.tensor([[1.0], [3.0]])).flatten()
    tensor([-0.7071,  0.7071])
    """

    triangular = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int | Sequence[int]) -> None:
        super().__init__()
        self.shape = _shape(features)
        self.register_buffer("mean", torch.zeros(self.shape))
        self.register_buffer("deviation", torch.ones(self.shape))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (x - self.mean) / self.deviation, -self._total(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return z * self.deviation + self.mean, self._total(z)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.forward(x)[0], -self.deviation.log().expand_as(x)

    def _total(self, x: Tensor) -> Tensor:
        places = x.shape[1:].numel() // self.mean.numel()
        return (places * self.deviation.log().sum()).expand(x.shape[0])

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        mean, deviation = moments(x, self.shape, "Standardise")
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
        return self.forward(x, context)[0]

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))


class Logit(Transform):
    """``z = log(y / (1 - y))`` with ``y = alpha + (1 - 2 alpha) x``, from [0, 1] (open if ``alpha = 0``) to the line.

    The inverse is of the whole line: its ``x`` may lie up to ``alpha / (1 - 2 alpha)`` outside of [0, 1]. It keeps
    ``y`` so far from 0 and 1 that `forward` of ``x`` is finite, also where a sigmoid rounds to them.

    >>> Logit()(torch.tensor([[0.5]]))
    (tensor([[0.]]), tensor([1.3863]))
    """

    triangular = True

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        if not 0 <= alpha < 0.5:
            raise ValueError(f"alpha: expected a number in [0, 0.5); got {alpha!r}.")
        self.alpha = alpha

    def _log_slopes_at(self, z: Tensor) -> Tensor:
        # log dz/dx = log(1 - 2 alpha) - log y - log(1 - y), and y = sigmoid(z).
        return math.log1p(-2 * self.alpha) - logsigmoid(z) - logsigmoid(-z)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.alpha + (1 - 2 * self.alpha) * x
        z = y.log() - torch.log1p(-y)
        return z, self._log_slopes_at(z)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = Logit.log_slopes(self, x)
        return z, slopes.flatten(1).sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        limits = torch.finfo(z.dtype)
        y = torch.sigmoid(z).clamp(max(limits.tiny, 4 * limits.eps * self.alpha), 1 - 2 * limits.eps)
        x = (y - self.alpha) / (1 - 2 * self.alpha)
        return x, -self._log_slopes_at(z).flatten(1).sum(1)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


SUPPORTS = ("line", "positive", "negative", "unit")


class Support(Transform):
    """Each coordinate from its support to the line: ``x``, ``log x``, ``-log(-x)`` or ``log(x / (1 - x))``.

    ``supports`` names them: ``"line"``, ``"positive"``, ``"negative"`` (below zero), ``"unit"`` (between 0 and 1).

    >>> Support(["line", "unit"])(torch.tensor([[3.0, 0.5]]))
    (tensor([[3., 0.]]), tensor([1.3863]))
    """

    triangular = True
    below: Tensor
    above: Tensor

    def __init__(self, supports: Sequence[str]) -> None:
        super().__init__()
        for name in supports:
            check_choice("supports", name, SUPPORTS)
        self.supports = tuple(supports)
        # Which sides have an edge; a coordinate with both lies between 0 and 1.
        self.register_buffer("below", torch.tensor([s in ("positive", "unit") for s in supports], dtype=torch.bool))
        self.register_buffer("above", torch.tensor([s in ("negative", "unit") for s in supports], dtype=torch.bool))

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # A side without an edge is at distance 1, whose logarithm is zero.
        low = torch.where(self.below, x, 1).log()
        high = torch.where(self.above, self.below.to(x) - x, 1).log()
        return torch.where(self.below | self.above, low - high, x), -(low + high)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = self.log_slopes(x)
        return z, slopes.sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        unit = self.below & self.above
        # Zero where it is not used: what overflows there would spoil the gradient.
        one_sided = torch.where(self.below ^ self.above, torch.where(self.below, z, -z), 0)
        x = torch.where(self.below, one_sided.exp(), -one_sided.exp())
        x = torch.where(unit, torch.sigmoid(z), torch.where(self.below | self.above, x, z))
        return x, (one_sided + torch.where(unit, logsigmoid(z) + logsigmoid(-z), 0)).sum(1)

    def extra_repr(self) -> str:
        return ", ".join(self.supports)


class Asinh(Transform):
    """``z = asinh(x)`` in the coordinates of ``columns``: a straight line at 0, a logarithm in both tails.

    >>> Asinh([True, False])(torch.tensor([[1.0, 1.0]]))
    (tensor([[0.8814, 1.0000]]), tensor([-0.3466]))
    """

    triangular = True
    columns: Tensor

    def __init__(self, columns: Sequence[bool]) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.bool))

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bent = torch.where(self.columns, x, 0)
        # log dz/dx = -log(1 + x^2) / 2 by hypot, which does not overflow.
        slope = torch.hypot(bent, torch.ones_like(bent)).log()
        return torch.where(self.columns, torch.asinh(bent), x), -slope

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = self.log_slopes(x)
        return z, slopes.sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bent = torch.where(self.columns, z, 0)
        return torch.where(self.columns, torch.sinh(bent), z), torch.cosh(bent).log().sum(1)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.columns.tolist()))


class Quantiles(Transform):
    """``z_i = f_i(x_i)``, smooth, such that quantiles of the data seen by `initialise` become those of ``N(0, 1)``.

    They are taken at the probabilities ``(k + 1/2) / knots``, and are fixed from then on. Between two knots ``f`` is a
    rational quadratic spline (Gregory & Delbourgo 1982), whose slope at a knot is the geometric mean of those on both
    sides; beyond the outer ones it is a line with the mean slope since the median. Repeated values share a knot. If the
    Gaussian of ``z`` is less likely than that of ``x``, as with clusters on a line, all ``f_i`` are standardisations.

    >>> t, x = Quantiles(1, knots=32), torch.randn(2000, 1).exp()
    >>> z = t.initialise(x).sort(0).values
    >>> bool((z[500] + 0.674).abs() < 0.05), bool((z[1500] - 0.674).abs() < 0.05)
    (True, True)
    """

    triangular = True
    first: Tensor
    gaps: Tensor
    slopes: Tensor

    def __init__(self, features: int, knots: int = 32) -> None:
        super().__init__()
        check_count("features", features)
        check_count("knots", knots, 3)
        # The first knot of each coordinate, logarithms of the distances between them, and of the slopes of all chords.
        self.register_buffer("first", torch.zeros(2, features))
        self.register_buffer("gaps", torch.zeros(features, knots - 1))
        self.register_buffer("slopes", torch.zeros(features, knots + 1))

    def _spline(self, x: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """The other side of ``f``, and the logarithm of its slope there."""
        gaps, chords = self.gaps.exp(), self.slopes.exp()
        steps = gaps * chords[:, 1:-1]
        starts = zip(self.first, (gaps, steps), strict=True)
        places, values = (first[:, None] + pad(d.cumsum(1), (1, 0)) for first, d in starts)
        ends = [self.slopes[:, :1], 0.5 * (self.slopes[:, 1:-2] + self.slopes[:, 2:-1]), self.slopes[:, -1:]]
        tangents = torch.cat(ends, 1).exp()
        knots = values if inverse else places
        inside = torch.maximum(torch.minimum(x.mT, knots[:, -1:]), knots[:, :1])
        k = torch.searchsorted(knots[:, 1:-1].contiguous(), inside.detach().contiguous())
        gap, step, chord, low, high = (
            t.gather(1, k) for t in (gaps, steps, chords[:, 1:-1], tangents[:, :-1], tangents[:, 1:])
        )
        place, value, bend = places.gather(1, k), values.gather(1, k), low + high - 2 * chord
        beyond = x.mT - inside
        if inverse:
            y = inside - value
            b, c = step * low - y * bend, -chord * y
            root = (b * b - 4 * (step * (chord - low) + y * bend) * c).clamp_min(0).sqrt()
            t = -2 * c / (b + root)
            beyond = beyond / torch.where(beyond > 0, high, low)
        else:
            t = (inside - place) / gap
        across = t * (1 - t)
        below = chord + bend * across
        top = high * t * t + 2 * chord * across + low * (1 - t) ** 2
        log_slope = 2 * (chord / below).log() + top.log()
        if inverse:
            return (place + gap * t + beyond).mT, log_slope.mT
        out = value + step * (chord * t * t + low * across) / below
        return (out + beyond * torch.where(beyond > 0, high, low)).mT, log_slope.mT

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._spline(x, inverse=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, slopes = self._spline(x, inverse=False)
        return z, slopes.sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, slopes = self._spline(z, inverse=True)
        return x, -slopes.sum(1)

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        features, knots = len(self.gaps), self.gaps.shape[1] + 1
        mean, deviation = moments(x, (features,), "Quantiles")
        p = (torch.arange(knots, dtype=torch.float64, device=x.device) + 0.5) / knots
        normal = torch.special.ndtri(p)
        for i, (column, width) in enumerate(zip(x.double().mT, deviation.double(), strict=True)):
            there = torch.quantile(column, p)
            middle = torch.quantile(column, 0.5)
            # Values closer than float32 can tell share a knot; what is left over continues the last line.
            places, group = torch.unique(((there - middle) / (1e-4 * width)).round(), return_inverse=True)
            count = torch.zeros_like(places).index_add(0, group, torch.ones_like(there))
            places = torch.zeros_like(places).index_add(0, group, there) / count
            values = torch.zeros_like(places).index_add(0, group, normal) / count
            outer = torch.stack([middle - there[0], there[-1] - middle]).maximum(0.1 * width).log()
            outer = normal[-1].log() - outer
            gaps, lines = places.diff().log(), (values.diff() / places.diff()).log()
            rest = knots - len(places)
            self.first[:, i] = torch.stack([places[0], values[0]])
            self.gaps[i] = torch.cat([gaps, width.log().expand(rest)])
            self.slopes[i] = torch.cat([outer[:1], lines, outer[1:].expand(rest + 1)])
        if not self._useful(x, deviation):
            self.first.copy_(torch.stack([mean, torch.zeros_like(mean)]))
            self.gaps.zero_()
            self.slopes.copy_(-deviation.log()[:, None].expand(-1, knots + 1))
        return self.forward(x)[0]

    def _useful(self, x: Tensor, deviation: Tensor) -> bool:
        """Whether the bends make the Gaussian behind them more likely, by more than the number of their knots.

        The mean of ``log p`` under the Gaussian of ``z`` is, up to a constant, ``sum_i mean(log f_i') - log std(z_i)``,
        less half the logarithm of the determinant of its correlations. By Akaike's criterion a knot costs ``1 / n``.
        """
        n, d = x.shape
        z, slopes = self.log_slopes(x)

        def scatter(z: Tensor) -> Tensor:
            weight = 1 - max((d / (n + d)) ** 2, 1e-6)  # as in `Whiten`
            correlations = torch.corrcoef(z.double().mT).reshape(d, d) * weight
            return 0.5 * torch.linalg.slogdet(correlations.fill_diagonal_(1))[1]

        bent = (slopes.mean(0) - z.std(0).log() + deviation.log()).sum() - scatter(z)
        return bool(bent - self.gaps.numel() / n > -scatter(x))

    def extra_repr(self) -> str:
        return f"{len(self.gaps)}, knots={self.gaps.shape[1] + 1}"


class Sigmoid(Logit):
    """``z = 1 / (1 + exp(-x))``, the inverse of `Logit`: from the line to (0, 1).

    >>> Sigmoid()(torch.tensor([[0.0]]))
    (tensor([[0.5000]]), tensor([-1.3863]))
    """

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(z, context)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.forward(x)[0], -self._log_slopes_at(x)
