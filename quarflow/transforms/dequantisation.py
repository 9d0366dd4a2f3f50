"""Noise that knows the image: variational dequantisation as a transform."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quarflow.checks import check_count
from quarflow.nn.conditioners import normalising
from quarflow.solvers import conditioned
from quarflow.transforms.base import Chain, Transform
from quarflow.transforms.elementwise import Logit, Sigmoid


class Dequantisation(Transform):
    """``x = (k + u) / levels  ->  z = (k + g(u; k)) / levels``, ``k`` whole numbers, ``u`` and ``g`` in (0, 1).

    Variational dequantisation (Ho et al. 2019, arXiv:1902.00275), as a step of the flow. ``u`` is uniform noise, and
    ``v = g(u; k) = sigmoid(transform(logit(u); net(k)))`` is noise with the density ``q(v | k) = 1 / |det dg/du|``. So
    the log-density of a flow behind this step, at an image with uniform noise, is

        log p((k + v) / levels) - log q(v | k),

    whose mean over ``u`` is the variational lower bound of the log-probability of the image: what `quarflow.fit` raises
    and `quarflow.bits_per_dim` reports, as a bound. The step maps each cell onto itself, so a sample stays the same
    whole numbers. Values within half a rounding unit of the edge of a cell count as that far from it.

    Args:
        transform: of the logits of ``u``; its context is what ``net`` gives.
        net: ``net(k / levels - 1/2, context)``.
        levels: whole numbers from 0 to 1; those beyond have cells as well.

    Shapes: (batch, *event) -> (batch, *event).

    >>> from quarflow.transforms.elementwise import Affine
    >>> step = Dequantisation(Affine((1, 2, 2), context=3), lambda k, context: k.flatten(1)[:, :3])
    >>> x = torch.rand(1, 1, 2, 2)
    >>> torch.equal((256 * step(x)[0]).floor(), (256 * x).floor())
    True
    """

    def __init__(self, transform: Transform, net: nn.Module, levels: int = 256) -> None:
        super().__init__()
        check_count("levels", levels, least=2)
        self.cell = Chain([Logit(), transform, Sigmoid()])
        self.net = net
        self.levels = levels
        self.exact = self.cell.exact

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(k, u)``."""
        k = (x * self.levels).floor()
        return k, self._inside(x * self.levels - k)

    def _inside(self, u: Tensor) -> Tensor:
        edge = self.levels * torch.finfo(u.dtype).eps / 2
        return u.clamp(edge, 1 - edge)

    def features(self, k: Tensor, context: Tensor | None) -> Tensor:
        """What is known of the image."""
        known: Tensor = self.net(k / self.levels - 0.5, context)
        return known

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, u = self.parts(x)
        v, ladj = self.cell(u, self.features(k, context))
        return (k + self._inside(v)) / self.levels, ladj

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v = self.parts(z)
        u, ladj = self.cell.inverse(v, self.features(k, context))
        return (k + self._inside(u)) / self.levels, ladj

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        k, u = self.parts(x)
        with normalising(self.net):
            known = self.features(k, context)
        return (k + self._inside(self.cell.initialise(u, known))) / self.levels

    def extra_repr(self) -> str:
        return f"levels={self.levels}"
