"""Networks of images without a bound on their slopes: what couplings read their parameters from.

Each takes (batch, inputs, H, W) and gives (batch, targets, H, W, outputs): ``outputs`` numbers for each value that
changes. Its context is of vectors (batch, features), or of images (batch, features, H, W).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, dropout, elu, glu, scaled_dot_product_attention

from quarflow.checks import check_count


class Conv(nn.Module):
    """``h = W * a + b + C c``, a convolution that keeps height and width: (batch, in, H, W) -> (batch, out, H, W).

    ``gain`` is the size of ``h`` at the start; with 0 it is zero.

    >>> Conv(2, 3, context=5)(torch.zeros(1, 2, 4, 4), torch.zeros(1, 5)).shape
    torch.Size([1, 3, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, context: int = 0, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        scale = gain * (inputs * kernel**2 + context) ** -0.5
        self.weight = nn.Parameter(scale * torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.context = nn.Parameter(scale * torch.randn(outputs, context, 1, 1)) if context else None

    def forward(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        h = conv2d(a, self.weight, self.bias, padding=self.weight.shape[-1] // 2)
        if self.context is None or context is None:
            return h
        return h + conv2d(context[:, :, None, None] if context.ndim == 2 else context, self.context)

    @torch.no_grad()
    def normalise(self, h: Tensor) -> Tensor:
        """Rescales the weights whose output is ``h``: each channel of it gets mean 0 and deviation ``gain``."""
        mean, deviation = h.mean((0, 2, 3)), h.std((0, 2, 3))
        # A channel that does not vary has nothing to measure, nor has a single number.
        scale = torch.where(deviation > 1e-6 * (1 + mean.abs()), self.gain / deviation, 1)
        self.bias.copy_((self.bias - mean) * scale)
        for weight in (self.weight, self.context):
            if weight is not None:
                weight.mul_(scale.view(-1, 1, 1, 1))
        return (h - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1)

    def extra_repr(self) -> str:
        context = "" if self.context is None else f", context={self.context.shape[1]}"
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, kernel={self.weight.shape[-1]}{context}"


@contextmanager
def normalising(net: nn.Module) -> Iterator[None]:
    """Within it, each `Conv` of ``net`` that is passed through sets its scale from what it sees (`Conv.normalise`).

    >>> net = Conv(1, 1)
    >>> with normalising(net):
    ...     h = net(torch.arange(16.0).view(1, 1, 4, 4))
    >>> bool((net(torch.arange(16.0).view(1, 1, 4, 4)) - h).abs().max() < 1e-5), round(h.std().item(), 3)
    (True, 1.0)
    """

    handles = [
        m.register_forward_hook(lambda _, arguments, h, conv=m: conv.normalise(h))
        for m in net.modules()
        if isinstance(m, Conv)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _per_target(h: Tensor, outputs: int, like: Tensor) -> Tensor:
    """(batch, targets * outputs, H, W) -> (batch, targets, H, W, outputs)."""
    return h.to(like.dtype).unflatten(1, (-1, outputs)).movedim(2, -1)


class ConvConditioner(nn.Module):
    """3x3, then 1x1, then 3x3 convolutions with ReLU between; the last starts at zero (Kingma & Dhariwal 2018).

    Args:
        inputs: channels that it reads.
        targets: channels that it writes for.
        outputs: numbers for each value that changes.
        hidden: units of each hidden layer; with none it is one 3x3 convolution.
        context: number of context features, 0 for none.

    >>> net = ConvConditioner(2, 3, outputs=2, hidden=(8, 8))
    >>> net(torch.zeros(1, 2, 4, 4)).shape
    torch.Size([1, 3, 4, 4, 2])
    """

    def __init__(
        self, inputs: int, targets: int, outputs: int = 2, hidden: Sequence[int] = (512, 512), context: int = 0
    ) -> None:
        super().__init__()
        for name, value in {"inputs": inputs, "targets": targets, "outputs": outputs}.items():
            check_count(name, value)
        for units in hidden:
            check_count("hidden", units)
        check_count("context", context, least=0)
        self.outputs = outputs
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(
            Conv(read, write, 1 if i else 3, context)
            for i, (read, write) in enumerate(pairwise(widths))
        )
        self.last = Conv(widths[-1], targets * outputs, 3, context, gain=0.0)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.relu(layer(h, context))
        return _per_target(self.last(h, context), self.outputs, x)


def concat_elu(h: Tensor) -> Tensor:
    """``elu((h, -h))``, twice the channels.

    >>> concat_elu(torch.ones(1, 1)).round(decimals=2)
    tensor([[ 1.0000, -0.6300]])
    """
    return elu(torch.cat([h, -h], 1))


class GatedConv(nn.Module):
    """``h + a sigmoid(b)``, ``(a, b)`` two convolutions of ``h`` with `concat_elu` before each.

    Shapes: (batch, hidden, H, W) -> the same.

    >>> GatedConv(4)(torch.zeros(1, 4, 2, 2)).shape
    torch.Size([1, 4, 2, 2])
    """

    def __init__(self, hidden: int, context: int = 0, dropout: float = 0.0, kernel: int = 1) -> None:
        super().__init__()
        self.first = Conv(2 * hidden, hidden, 3, context)
        self.second = Conv(2 * hidden, 2 * hidden, kernel, gain=0.1)
        self.dropout = dropout

    def forward(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        a = concat_elu(self.first(concat_elu(h), context))
        return h + glu(self.second(dropout(a, self.dropout, self.training)), 1)


class GatedAttention(nn.Module):
    """``h + a sigmoid(b)``, ``(a, b)`` of what ``heads`` of attention over all pixels bring together.

    Shapes: (batch, hidden, H, W) -> the same; ``position`` (hidden, H, W) tells pixels apart.

    >>> GatedAttention(4, heads=2)(torch.zeros(1, 4, 2, 2), torch.zeros(4, 2, 2)).shape
    torch.Size([1, 4, 2, 2])
    """

    def __init__(self, hidden: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.first = Conv(hidden, 3 * hidden, 1)
        self.second = Conv(hidden, 2 * hidden, 1, gain=0.1)
        self.dropout = dropout

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        parts = self.first(h + position).flatten(2).unflatten(1, (3, self.heads, -1))  # (batch, 3, heads, units, H W)
        query, key, value = parts.mT.unbind(1)
        a = scaled_dot_product_attention(query, key, value).mT.reshape(h.shape)
        return h + glu(self.second(dropout(a, self.dropout, self.training)), 1)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each pixel.

    >>> ChannelNorm(2)(torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)).flatten().round(decimals=2)
    tensor([-1.,  1.], grad_fn=...)
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GatedBlock(nn.Module):
    """`GatedConv`, then `GatedAttention`, normalised behind each.

    >>> GatedBlock(4, heads=2)(torch.zeros(1, 4, 2, 2), torch.zeros(4, 2, 2)).shape
    torch.Size([1, 4, 2, 2])
    """

    def __init__(self, hidden: int, heads: int = 4, context: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = GatedConv(hidden, context, dropout)
        self.norm = ChannelNorm(hidden)
        self.attention = GatedAttention(hidden, heads, dropout)
        self.last_norm = ChannelNorm(hidden)

    def forward(self, h: Tensor, position: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.norm(self.conv(h, context))
        return self.last_norm(self.attention(h, position))


class AttentionConditioner(nn.Module):
    """3x3, then ``depth`` times a gated convolution and gated attention over all pixels, then 3x3 (Ho et al. 2019).

    Args:
        inputs: channels that it reads.
        targets: channels that it writes for.
        outputs: numbers for each value that changes.
        size: height and width.
        hidden: channels between, a multiple of ``heads``.
        depth: number of gated convolutions, each with its attention.
        heads: of the attention.
        context: number of context features, 0 for none.
        dropout: part of the units that are dropped in training.

    >>> net = AttentionConditioner(2, 3, outputs=5, size=(4, 2), hidden=8, depth=1)
    >>> net(torch.zeros(1, 2, 4, 2)).shape
    torch.Size([1, 3, 4, 2, 5])
    """

    def __init__(
        self,
        inputs: int,
        targets: int,
        outputs: int,
        size: tuple[int, int],
        hidden: int = 96,
        depth: int = 10,
        heads: int = 4,
        context: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        counts = {"inputs": inputs, "targets": targets, "outputs": outputs, "depth": depth, "heads": heads}
        for name, value in counts.items():
            check_count(name, value)
        check_count("context", context, least=0)
        check_count("hidden", hidden)
        if hidden % heads:
            raise ValueError(f"hidden: expected a multiple of the {heads} heads; got {hidden}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1); got {dropout!r}.")
        self.outputs = outputs
        self.first = Conv(inputs, hidden)
        self.position = nn.Parameter(0.01 * torch.randn(hidden, *size))
        self.blocks = nn.ModuleList(GatedBlock(hidden, heads, context, dropout) for _ in range(depth))
        self.last = Conv(hidden, targets * outputs, gain=0.1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h, self.position, context)
        return _per_target(self.last(h), self.outputs, x)


def colours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two colours of a checkerboard, each of half the width: (..., H, W) -> twice (..., H, W / 2).

    >>> [c.tolist() for c in colours(torch.arange(4).view(2, 2))]
    [[[0], [3]], [[1], [2]]]
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even width for a checkerboard; got {tuple(x.shape)}. Pad or crop.")
    first, second = _turned(x.unflatten(-1, (-1, 2))).unbind(-1)
    return first, second


def board(first: Tensor, second: Tensor) -> Tensor:
    """The image whose `colours` are ``first`` and ``second``.

    >>> torch.equal(board(*colours(torch.ones(2, 4))), torch.ones(2, 4))
    True
    """
    return _turned(torch.stack([first, second], -1)).flatten(-2)


def _turned(pairs: Tensor) -> Tensor:
    """Pairs in odd rows the other way round: (..., H, W / 2, 2)."""
    odd = torch.arange(pairs.shape[-3], device=pairs.device)[:, None, None] % 2 == 1
    return torch.where(odd, pairs.flip(-1), pairs)


class PixelFeatures(nn.Module):
    """What there is to know of an image around each pair of its pixels, as context for either of its `colours`.

    A 3x3 convolution of both colours side by side, and gated convolutions (Ho et al. 2019).

    Shapes: (batch, channels, H, W) -> (batch, hidden, H, W / 2).

    >>> PixelFeatures(3, hidden=8)(torch.zeros(1, 3, 4, 4)).shape
    torch.Size([1, 8, 4, 2])
    """

    def __init__(
        self, channels: int, hidden: int = 32, depth: int = 3, context: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.first = Conv(2 * channels, hidden, 3, context)
        self.blocks = nn.ModuleList(GatedConv(hidden, context, dropout, kernel=3) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(torch.cat(colours(x), 1), context)
        for block in self.blocks:
            h = block(h, context)
        return h.to(x.dtype)
