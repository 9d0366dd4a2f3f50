"""Activations with slopes in [-1, 1], each returned with its slope.

To add one: subclass `Activation`, write `forward` (value and slope, elementwise), put the class in `ACTIVATIONS`.
The tests then hold it to its contract: the slope is the derivative, and the Lipschitz constant is at most one. An
activation without parameters may also have `curves`, with which the fast path of `quarflow.kernels.triangular` runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, softplus


class Activation(nn.Module):
    """``phi(h)`` and ``phi'(h)`` for hidden values ``h`` of shape (features, units, batch).

    ``width`` is the number of outputs for each unit (2 for concatenated activations). Whatever the width, the map from
    one unit to its outputs has a Lipschitz constant of at most one.

    >>> value, slope = Sine()(torch.zeros(1, 1, 1))
    >>> value.item(), slope.item()
    (0.0, 1.0)
    """

    width: int = 1

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must define forward(h) -> (value, slope).")

    # ``curves(h / unit, second) -> (value / unit, s, phi''(h) / bend if second else None)``, without gradients; may
    # overwrite its argument. ``s`` is what `times_slope` multiplies by the slope with. The constants go into products
    # before and behind, where they cost nothing.
    curves: Any = None
    # ``recall(value / unit, delta) -> (s, phi''(h) u / bend)``, ``delta = phi'(h) u``: where these follow from what is
    # kept for the backward pass anyway, they are not kept.
    recall: Any = None
    unit: float = 1.0
    bend: float = 1.0

    def times_slope(self, u: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
        """``phi'(h) u``, with the ``s`` of `curves`; here that is the slope itself."""
        return torch.mul(u, s, out=out)


class ELU(Activation):
    """``h`` if ``h > 0`` else ``exp(h) - 1`` (Clevert et al. 2015), the paper's; slope in (0, 1].

    >>> ELU()(torch.tensor([2.0]))
    (tensor([2.]), tensor([1.]))
    """

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        value = elu(h)
        return value, 1 - torch.relu(-value)  # a clamp would take longer to differentiate

    def curves(self, h: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        value = elu(h)
        slope = (value + 1).clamp_(max=1)
        # 1 - 1 where h > 0: a tenth of the time of `torch.where`.
        return value, slope, slope - h.sign_().clamp_(min=0) if second else None

    def recall(self, value: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return (value + 1).clamp_(max=1), torch.addcmul(delta, delta, value.sign().clamp_(min=0), value=-1)


class Tanh(Activation):
    """``tanh(h)``; slope ``1 - tanh(h)^2`` in (0, 1].

    >>> Tanh()(torch.tensor([0.0]))
    (tensor([0.]), tensor([1.]))
    """

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.tanh(h)
        return value, 1 - value * value

    bend = -2.0

    def curves(self, h: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        value = torch.tanh(h)
        slope = 1 - value * value
        return value, slope, value * slope if second else None


class Sine(Activation):
    """``sin(h)``; slope ``cos(h)``, which fills [-1, 1].

    >>> Sine()(torch.tensor([0.0]))
    (tensor([0.]), tensor([1.]))
    """

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(h), torch.cos(h)

    bend = -1.0

    def curves(self, h: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        value = torch.sin(h)
        return value, torch.cos(h), value if second else None


class Wave(Activation):
    """A sine made of parabolas: slope ``1 - 4 |m|`` with ``m = h/6.4`` less its nearest integer.

    The slope fills [-1, 1] as the sine's does, changes as fast at its ends as anywhere else, which is what training
    needs near a bound, and costs a third of sine and cosine. The price: the slope has kinks, so a log-density made of
    it is continuous with kinks too, as one made of ReLU networks is. "sine" has none.

    >>> Wave()(torch.tensor([0.0, 1.6, 3.2]))
    (tensor([0.0000, 0.8000, 0.0000]), tensor([ 1.,  0., -1.]))
    """

    unit = 6.4
    bend = -4 / unit

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        m = h / self.unit
        m = m - m.round()
        return self.unit * m * (1 - 2 * m.abs()), 1 - 4 * m.abs()

    def curves(self, m: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        nearest = torch.round(m)
        m.sub_(nearest)
        a = torch.abs(m, out=nearest)
        if not second:
            return m.addcmul_(m, a, value=-2), a, None
        return torch.addcmul(m, m, a, value=-2), a, m.sign_()

    def times_slope(self, u: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
        if u.shape != s.shape:  # torch has no vectorised addcmul for what is broadcast
            return torch.mul(u, torch.rsub(s, 1, alpha=4), out=out)
        return torch.addcmul(u, s, u, value=-4, out=out)


class LipSwish(Activation):
    """``h sigmoid(b h) / 1.1`` with a learnable ``b > 0`` (Chen et al. 2019); slope in [-0.1, 1].

    The slope of ``u sigmoid(u)`` peaks at 1.0998, whatever ``b``.

    >>> LipSwish()(torch.tensor([0.0]))[0]
    tensor([0.], grad_fn=<DivBackward0>)
    """

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        b = softplus(self.beta)
        gate = torch.sigmoid(b * h)
        return h * gate / 1.1, gate * (1 + b * h * (1 - gate)) / 1.1


class CLipSwish(LipSwish):
    """``[phi(h), phi(-h)] / 1.0041`` with ``phi`` the `LipSwish` (Perugachi-Diaz et al. 2021).

    Two outputs for each unit; ``sqrt(phi'(h)^2 + phi'(-h)^2)`` peaks at 1.00400, whatever ``b``.

    >>> CLipSwish()(torch.zeros(1, 3, 5))[0].shape
    torch.Size([1, 6, 5])
    """

    width = 2

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        (up, up_slope), (down, down_slope) = super().forward(h), super().forward(-h)
        return torch.cat([up, down], -2) / 1.0041, torch.cat([up_slope, -down_slope], -2) / 1.0041


ACTIVATIONS: dict[str, type[Activation]] = {
    "elu": ELU,
    "lipswish": LipSwish,
    "sine": Sine,
    "wave": Wave,
    "tanh": Tanh,
    "clipswish": CLipSwish,
}


def activation(name: str) -> Activation:
    """A new activation module by its name in `ACTIVATIONS`.

    >>> activation("sine")
    Sine()
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}; got {name!r}.")
    return ACTIVATIONS[name]()
