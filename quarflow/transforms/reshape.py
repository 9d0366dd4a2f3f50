"""Maps that move the values of images and leave them as they are; and flows of several scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from quarflow.checks import check_count
from quarflow.solvers import conditioned
from quarflow.transforms.base import Transform


class Squeeze(Transform):
    """Patches of 2x2 pixels as one pixel of four times the channels; ``ladj = 0``.

    Shapes: (batch, C, H, W) -> (batch, 4 C, H / 2, W / 2); channel ``4 c + 2 i + j`` is pixel ``(i, j)`` of a patch.

    >>> Squeeze()(torch.arange(4.0).view(1, 1, 2, 2))[0].flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.shape[-2] % 2 or x.shape[-1] % 2:
            raise ValueError(f"x: expected an even height and width to squeeze; got {tuple(x.shape)}. Pad or crop.")
        return torch.nn.functional.pixel_unshuffle(x, 2), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.pixel_shuffle(z, 2), z.new_zeros(z.shape[0])

    def places(self, mark: Tensor) -> Tensor:
        return self.forward(mark)[0]


class Reshape(Transform):
    """Another shape for the same values in the same order; ``ladj = 0``.

    >>> Reshape((1, 2, 2), (4,))(torch.zeros(3, 1, 2, 2))[0].shape
    torch.Size([3, 4])
    """

    def __init__(self, before: Sequence[int], after: Sequence[int]) -> None:
        super().__init__()
        self.before, self.after = tuple(before), tuple(after)
        for n in (*self.before, *self.after):
            check_count("before and after", n)
        if torch.Size(self.before).numel() != torch.Size(self.after).numel():
            raise ValueError(f"after: expected as many values as in {self.before}; got {self.after}.")

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.reshape(-1, *self.after), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return z.reshape(-1, *self.before), z.new_zeros(z.shape[0])

    def places(self, mark: Tensor) -> Tensor:
        return self.forward(mark)[0]

    def extra_repr(self) -> str:
        return f"{self.before} -> {self.after}"


class MultiScale(Transform):
    """Scales one after the other, with half of the channels finished behind each but the last (Dinh et al. 2016).

    ``x`` are images, (batch, C, H, W), or vectors, (batch, D). ``z`` has the shape of ``x``: the finished halves, then
    the output of the last scale, in one row of values.

    >>> flow = MultiScale([Squeeze(), Squeeze()])
    >>> flow(torch.zeros(1, 1, 4, 4))[0].shape
    torch.Size([1, 1, 4, 4])
    """

    def __init__(self, scales: Iterable[Transform]) -> None:
        super().__init__()
        self.scales = nn.ModuleList(scales)
        self.exact = all(t.exact for t in self._scales())

    def _scales(self) -> list[Transform]:
        return cast("list[Transform]", list(self.scales))

    def _through(self, step: Callable[[Transform, Tensor], Tensor], x: Tensor) -> Tensor:
        """``step`` at each scale, on what the scale before left."""
        h, finished = x, []
        for i, scale in enumerate(self._scales()):
            h = step(scale, h)
            if i < len(self.scales) - 1:
                done, h = _halves(h)
                finished.append(done.flatten(1))
        return torch.cat([*finished, h.flatten(1)], 1).view(x.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ladj = x.new_zeros(x.shape[0])

        def step(scale: Transform, h: Tensor) -> Tensor:
            nonlocal ladj
            h, part = scale(h, context)
            ladj = ladj + part
            return h

        return self._through(step, x), ladj

    @conditioned
    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shapes = self._shapes(z.shape[1:])
        finished = [torch.Size((s[0] - s[0] // 2, *s[1:])) for s in shapes[:-1]] + shapes[-1:]
        values = z.flatten(1).split([s.numel() for s in finished], 1)
        parts = [part.view(-1, *s) for part, s in zip(values, finished, strict=True)]
        h, ladj = parts[-1], z.new_zeros(z.shape[0])
        for i in range(len(shapes) - 1, -1, -1):
            if i < len(shapes) - 1:
                h = torch.cat([parts[i], h], 1)
            h, part = self._scales()[i].inverse(h, context)
            ladj = ladj + part
        return h, ladj

    def _shapes(self, shape: torch.Size) -> list[torch.Size]:
        """What each scale gives for values of ``shape``: squeezes alone change it."""
        shapes, (channels, *sides) = [], shape
        for scale in self._scales():
            factor = 2 ** sum(isinstance(m, Squeeze) for m in scale.modules())
            channels, sides = channels * factor ** len(sides), [n // factor for n in sides]
            shapes.append(torch.Size((channels, *sides)))
            channels //= 2
        return shapes

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self._through(lambda scale, h: scale.initialise(h, context), x)

    def places(self, mark: Tensor) -> Tensor:
        return self._through(lambda scale, h: scale.places(h), mark)


def _halves(h: Tensor) -> tuple[Tensor, Tensor]:
    done, rest = h.split([h.shape[1] - h.shape[1] // 2, h.shape[1] // 2], 1)
    return done, rest
