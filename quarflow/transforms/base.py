"""The contract of every invertible map, and the two maps made of other maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from quarflow.solvers import conditioned


class Transform(nn.Module, ABC):
    """``z = f(x)``, from data to noise, with ``ladj = log|det dz/dx|``.

    To add a transform, write `forward` and `inverse`. Both take (batch, *event) and a context (batch, features) or
    None, and return ``(output, ladj)`` with ``ladj`` of shape (batch,), each for its own direction: ``ladj`` of the
    inverse is minus that of forward at the same point. `forward` must not change state, look at values, or leave the
    dtype and device of ``x``: then it works under `torch.func`, `torch.compile` and autocast. What depends on data
    belongs in `initialise`. ``exact`` is False where ``ladj`` is an estimate. ``triangular`` is True where ``z_i``
    depends on ``x_<=i`` alone, in the order of the flattened event, whatever the parameters are: then there is
    `log_slopes` too.

    >>> class Shift(Transform):
    ...     def forward(self, x, context=None):
    ...         return x + 1, x.new_zeros(len(x))
    ...     def inverse(self, z, context=None):
    ...         return z - 1, z.new_zeros(len(z))
    >>> Shift()(torch.zeros(1, 2))
    (tensor([[1., 1.]]), tensor([0.]))
    """

    exact: bool = True
    triangular: bool = False

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(f(x), log|det df/dx|)``."""

    @abstractmethod
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(f^{-1}(z), log|det df^{-1}/dz|)``."""

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Set what depends on data from a batch ``x`` and return ``f(x)``. Most transforms have nothing to set."""
        return self.forward(x, context)[0]

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(f(x), log|dz_i/dx_i|)``, both of the shape of ``x``, where f is ``triangular``; ``ladj`` is their sum."""
        raise NotImplementedError(f"{type(self).__name__} must define log_slopes(x, context), or is not triangular.")

    @torch.no_grad()
    def inverse_given(self, z: Tensor, x: Tensor, known: Tensor, context: Tensor | None = None) -> Tensor:
        """The point that is ``x`` where ``known``, and at which f is ``z``. There, ``z`` must be ``f(x)`` already.

        Shapes: ``z``, ``x`` (batch, *event), ``known`` (1, *event), True for the first coordinates of the order.
        """
        return torch.where(known, x, self.inverse(z, context)[0])

    def places(self, mark: Tensor) -> Tensor:
        """Where f puts coordinates: ``mark`` (1, *event) of ``x``, as a mark of ``z``. Most leave them in place."""
        return mark


class Chain(Transform):
    """``f = f_n o ... o f_1``; ``ladj`` is the sum.

    >>> chain = Chain([Chain([]), Inverse(Chain([]))])
    >>> chain(torch.ones(1, 2))
    (tensor([[1., 1.]]), tensor([0.]))
    """

    def __init__(self, transforms: Iterable[Transform]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(transforms)
        for i, t in enumerate(self.transforms):
            if not isinstance(t, Transform):
                raise ValueError(f"transforms: expected Transform objects; got {type(t).__name__} at position {i}.")
        self.exact = all(t.exact for t in self.steps)
        self.triangular = all(t.triangular for t in self.steps)

    @property
    def steps(self) -> list[Transform]:
        """The transforms in the order of `forward`."""
        return cast("list[Transform]", list(self.transforms))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ladj = x.new_zeros(x.shape[0])
        for t in self.steps:
            x, step = t(x, context)
            ladj = ladj + step
        return x, ladj

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ladj = z.new_zeros(z.shape[0])
        for t in reversed(self.steps):
            z, step = t.inverse(z, context)
            ladj = ladj + step
        return z, ladj

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        for t in self.steps:
            x = t.initialise(x, context)
        return x

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like(x)
        for t in self.steps:
            x, slopes = t.log_slopes(x, context)
            total = total + slopes
        return x, total

    @torch.no_grad()
    def inverse_given(self, z: Tensor, x: Tensor, known: Tensor, context: Tensor | None = None) -> Tensor:
        # Every step is held to what is known at its own input: nothing known is solved for, or drifts.
        points = [(x, known)]
        for t in self.steps[:-1]:
            x, known = t(x, context)[0], t.places(known)
            points.append((x, known))
        for t, (x, known) in zip(reversed(self.steps), reversed(points), strict=False):
            z = t.inverse_given(z, x, known, context)
        return z

    def places(self, mark: Tensor) -> Tensor:
        for t in self.steps:
            mark = t.places(mark)
        return mark


class Inverse(Transform):
    """``f^{-1}`` as a transform: forward and inverse of ``transform`` swapped.

    >>> from quarflow.transforms.elementwise import Logit
    >>> Inverse(Logit())(torch.zeros(1, 1))[0]
    tensor([[0.5000]])
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.exact, self.triangular = transform.exact, transform.triangular

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.transform.inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.transform(z, context)

    def log_slopes(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = self.transform.inverse(x, context)[0]
        return z, -self.transform.log_slopes(z, context)[1]
