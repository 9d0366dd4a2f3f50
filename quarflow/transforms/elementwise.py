"""Maps that act on each coordinate alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from quarflow.checks import check_count
from quarflow.transforms.base import Transform


def _shape(features: int | Sequence[int]) -> tuple[int, ...]:
    shape = tuple(features) if isinstance(features, Sequence) else (features,)
    for n in shape:
        check_count("features", n)
    return shape


def _moments(x: Tensor, shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
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
        mean, deviation = _moments(x, self.shape, "ActNorm")
        self.log_scale.copy_(-deviation.log())
        self.shift.copy_(-mean / deviation)
        return self.forward(x, context)[0]


class Standardise(Transform):
    """``z = (x - mean) / deviation`` with the fixed moments of the data seen by `initialise`.

    >>> t = Standardise(1)
    >>> t.initialise(torch.tensor([[1.0], [3.0]])).flatten()
    tensor([-0.7071,  0.7071])
    """

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

    def _total(self, x: Tensor) -> Tensor:
        places = x.shape[1:].numel() // self.mean.numel()
        return (places * self.deviation.log().sum()).expand(x.shape[0])

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        mean, deviation = _moments(x, self.shape, "Standardise")
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
        return self.forward(x, context)[0]

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))


class Logit(Transform):
    """``z = log(y / (1 - y))`` with ``y = alpha + (1 - 2 alpha) x``, from [0, 1] (open if ``alpha = 0``) to the line.

    >>> Logit()(torch.tensor([[0.5]]))
    (tensor([[0.]]), tensor([1.3863]))
    """

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        if not 0 <= alpha < 0.5:
            raise ValueError(f"alpha: expected a number in [0, 0.5); got {alpha!r}.")
        self.alpha = alpha

    def _ladj(self, z: Tensor) -> Tensor:
        # log dz/dx = log(1 - 2 alpha) - log y - log(1 - y), and y = sigmoid(z).
        slope = torch.log1p(z.new_tensor(-2 * self.alpha)) - logsigmoid(z) - logsigmoid(-z)
        return slope.flatten(1).sum(1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.alpha + (1 - 2 * self.alpha) * x
        z = y.log() - torch.log1p(-y)
        return z, self._ladj(z)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha), -self._ladj(z)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class Sigmoid(Logit):
    """``z = 1 / (1 + exp(-x))``, the inverse of `Logit`: from the line to (0, 1).

    >>> Sigmoid()(torch.tensor([[0.0]]))
    (tensor([[0.5000]]), tensor([-1.3863]))
    """

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(z, context)
