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
    belongs in `initialise`. ``exact`` is False where ``ladj`` is an estimate.

    >>> class Shift(Transform):
    ...     def forward(self, x, context=None):
    ...         return x + 1, x.new_zeros(len(x))
    ...     def inverse(self, z, context=None):
    ...         return z - 1, z.new_zeros(len(z))
    >>> Shift()(torch.zeros(1, 2))
    (tensor([[1., 1.]]), tensor([0.]))
    """

    exact: bool = True

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


class Inverse(Transform):
    """``f^{-1}`` as a transform: forward and inverse of ``transform`` swapped.

    >>> from quarflow.transforms.elementwise import Logit
    >>> Inverse(Logit())(torch.zeros(1, 1))[0]
    tensor([[0.5000]])
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.exact = transform.exact

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.transform.inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.transform(z, context)
