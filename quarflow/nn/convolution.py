"""Quasi-autoregressive and contractive networks for images: 3x3, 1x1 and 3x3 convolutions.

Between the two outer layers such a network is the same small network at every pixel. So the matrix form gathers what a
pixel reads into one column, runs the layers of `quarflow.nn.triangular` on these columns, and adds the outputs of the
last layer up where they belong: three matrix products for all pixels. `convolutions` is the same with ``conv2d``, to
read and to test against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, softplus

from quarflow.checks import check_choice, check_count, check_sigma
from quarflow.kernels import fuses, ran, turned_off, usable, without_triton
from quarflow.logdet import linearise
from quarflow.nn.activations import Activation
from quarflow.nn.activations import activation as make_activation
from quarflow.nn.bounds import floor, gram_norm
from quarflow.nn.masks import CENTRE, TAPS, ranks, window_mask
from quarflow.nn.triangular import BoundedNet, TriangularLinear, without_autocast

Taps = Sequence[tuple[int, int]]
FOR_IMAGES = ("diagonal", "coordinate")


def _shifted(a: Tensor, taps: Taps) -> list[Tensor]:
    """``a[..., p + tap]`` at every pixel ``p``, zero outside the image, for each tap."""
    height, width = a.shape[-2:]
    padded = pad(a, (1, 1, 1, 1))
    return [padded[..., 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width] for dy, dx in taps]


def gather(a: Tensor, taps: Taps) -> Tensor:
    """What each pixel reads: (channels, units, batch, H, W) -> (channels, taps, units, batch, H, W).

    >>> gather(torch.tensor([1.0, 2.0]).view(1, 1, 1, 1, 2), ((0, -1), (0, 0))).flatten(1).tolist()
    [[0.0, 1.0, 1.0, 2.0]]
    """
    return torch.stack(_shifted(a, taps), dim=1)


def spread(y: Tensor, taps: Taps) -> Tensor:
    """``out[p] = sum_t y_t[p + tap_t]``: (channels, taps, batch, H, W) -> (channels, batch, H, W).

    >>> spread(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 2, 1, 1, 2), ((0, -1), (0, 0))).flatten().tolist()
    [3.0, 5.0]
    """
    each = [_shifted(part, [tap])[0] for part, tap in zip(y.unbind(1), taps, strict=True)]
    return torch.stack(each).sum(0)


def read_columns(x: Tensor, order: str, opening: Activation | None = None) -> tuple[Tensor, Tensor | None]:
    """What each pixel of (batch, C, H, W) reads, behind the first activation, and the slopes of that.

    Shapes: -> (C * taps * width, batch * H * W), (C, width, batch * H * W).

    >>> read_columns(torch.ones(1, 1, 1, 2), "pixel")[0][3:]  # the pixel to the left, and itself
    tensor([[0., 1.],
            [1., 1.]])
    """
    batch, channels, height, width = x.shape
    a, delta = x.transpose(0, 1).reshape(channels, 1, -1), None
    if opening is not None:
        a, delta = opening(a)
    return gather(a.unflatten(2, (batch, height, width)), TAPS[order]).reshape(-1, batch * height * width), delta


def write_columns(value: Tensor, diagonal: Tensor, x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Columns of outputs, added up where they belong, and those of the diagonal, as images like ``x``.

    >>> x = torch.zeros(1, 1, 1, 2)
    >>> write_columns(torch.ones(5, 2), torch.ones(1, 2), x, "pixel")[0].flatten().tolist()
    [1.0, 2.0]
    """
    batch, channels, height, width = x.shape
    value = spread(value.view(channels, -1, batch, height, width), TAPS[order])
    return value.transpose(0, 1).to(x.dtype), diagonal.view(channels, batch, height, width).transpose(0, 1)


class WindowLinear(TriangularLinear):
    """A `TriangularLinear` that reads a window (``side="in"``) or writes one, to be added up by `spread`.

    The weight is (channels * out, channels * taps * in) or (channels * taps * out, channels * in), with a mask after
    `quarflow.nn.masks.window_mask`; the diagonal passes through the centre of the window alone.

    >>> layer = WindowLinear(2, 1, 3, "in", "pixel")
    >>> [t.shape for t in layer.matrices()]
    [torch.Size([6, 10]), torch.Size([2, 3, 1])]
    """

    def __init__(
        self, channels: int, in_units: int, out_units: int, side: str, order: str, context: int = 0
    ) -> None:
        mask = window_mask(ranks(channels, in_units), ranks(channels, out_units), order)
        self.taps = mask.shape[2]
        if side == "in":
            mask = mask.unflatten(1, (channels, in_units)).transpose(2, 3).flatten(1)
        else:
            mask = mask.unflatten(0, (channels, out_units)).permute(0, 3, 1, 2).flatten(0, 2)
        super().__init__(channels, in_units, out_units, context, mask.contiguous())
        self.side = side
        window = slice(CENTRE * in_units, (CENTRE + 1) * in_units)
        self.live = (slice(None), window)
        if side == "out":
            self.live = (slice(CENTRE * out_units, (CENTRE + 1) * out_units), slice(None))
            # As many terms are added up at a pixel as it has taps; and a bias is for a pixel, not for its taps.
            self.weight = nn.Parameter(self.weight.detach() / self.taps**0.5)
            self.bias = nn.Parameter(torch.zeros(channels * out_units, 1))
            if self.context is not None:
                centre = self.context.detach().unflatten(0, (channels, self.taps, out_units))[:, CENTRE]
                self.context = nn.Parameter(centre.flatten(0, 1).contiguous())

    def offset(self, context: Tensor | None) -> Tensor:
        """``b + C c``, for the centre of the window where the layer writes one."""
        offset = super().offset(context)
        if self.side == "in":
            return offset
        centre = offset.unflatten(0, (self.features, 1, self.out_units))
        return pad(centre, (0, 0, 0, 0, CENTRE, self.taps - CENTRE - 1)).flatten(0, 2)

    def kernel(self, weight: Tensor, order: str) -> Tensor:
        """``weight`` as that of ``conv2d``: (out, in, 3, 3)."""
        if self.side == "in":
            taps = weight.unflatten(1, (self.features, self.taps, -1)).transpose(2, 3).flatten(1, 2)
        else:
            taps = weight.unflatten(0, (self.features, self.taps, -1)).permute(0, 2, 3, 1).flatten(0, 1)
        kernel = weight.new_zeros(*taps.shape[:2], 3, 3)
        for t, (dy, dx) in enumerate(TAPS[order]):
            kernel[:, :, 1 + dy, 1 + dx] = taps[:, :, t]
        return kernel

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.taps} taps {self.side}"


class TriangularConvNet(BoundedNet):
    """``x -> (F(x), d(x))`` for images: ``dF/dx`` is triangular in the order of the coordinates, and ``|d| <= sigma``.

        a = phi(x) (or x),   3x3,   phi,   1x1,   phi,   3x3

    In ``order="pixel"`` coordinates go pixel by pixel in raster order, the channels of a pixel together (PixelRNN; the
    paper's); in ``order="channel"`` channel by channel, each in raster order (MintNet): then a unit sees lower channels
    at all nine neighbours. Only the centre of a window enters ``d``, so the bound is that of a small network for each
    channel, the same at every pixel.

    Shapes: (batch, C, H, W) -> (batch, C, H, W), (batch, C, H, W).

    Args:
        channels: C.
        hidden: units of each of the two hidden layers, a multiple of C.
        context: number of context features, 0 for none.
        activation: name in `quarflow.nn.activations.ACTIVATIONS`.
        order: "pixel" or "channel".
        opening: whether an activation comes first; not in the first block of a flow.
        lipschitz: "coordinate", a bound for each channel, or "diagonal", the largest for all (the paper's).
        sigma, trick, bound: as in `quarflow.nn.triangular.TriangularNet`.

    >>> net = TriangularConvNet(2, hidden=4).double()
    >>> x = torch.randn(1, 2, 2, 2, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: net(x)[0].permute(0, 2, 3, 1).flatten())(x).permute(0, 1, 3, 4, 2)
    >>> jacobian = jacobian.reshape(8, 8)  # pixel by pixel
    >>> jacobian.triu(1).abs().max().item()
    0.0
    >>> bool(torch.allclose(jacobian.diagonal(), net(x)[1].permute(0, 2, 3, 1).flatten()))
    True
    """

    def __init__(
        self,
        channels: int,
        hidden: int = 512,
        context: int = 0,
        activation: str = "wave",
        order: str = "pixel",
        opening: bool = True,
        lipschitz: str = "coordinate",
        sigma: float = 0.97,
        trick: bool = True,
        bound: str | None = None,
    ) -> None:
        check_count("channels", channels)
        check_count("hidden", hidden)
        check_count("context", context, least=0)
        check_choice("order", order, TAPS)
        check_choice("lipschitz", lipschitz, FOR_IMAGES)
        if hidden % channels:
            raise ValueError(
                f"hidden: expected a multiple of the {channels} channels, as many units for each; got {hidden}. "
                f"Take {max(1, round(hidden / channels)) * channels}."
            )
        units = hidden // channels
        first = make_activation(activation) if opening else None
        acts = [make_activation(activation) for _ in range(2)]
        layers = [
            WindowLinear(channels, 1 if first is None else first.width, units, "in", order, context),
            TriangularLinear(channels, units * acts[0].width, units, context),
            WindowLinear(channels, units * acts[1].width, 1, "out", order, context),
        ]
        super().__init__(channels, layers, acts, first, lipschitz, sigma, trick, bound)
        self.order, self.context_features = order, context

    @property
    def axes(self) -> tuple[int, int, int] | None:
        """Axes of (batch, C, H, W) that bring an image's coordinates into their order; None if they are."""
        return (2, 3, 1) if self.order == "pixel" else None

    def _offsets(self, context: Tensor | None, pixels: int) -> list[Tensor]:
        c = None if context is None else context.mT
        each = [layer.offset(c) for layer in self._layers()]
        return each if c is None else [o.repeat_interleave(pixels, 1) for o in each]

    def _columns(self, run: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
        """``run`` on what each pixel reads; its outputs where they belong."""
        opening = self.opening
        read, write = read_columns, write_columns
        numel = len(self._layers()[0].weight) * x[:, 0].numel()
        if usable(x) and fuses(x, numel):
            from quarflow.kernels import convolution_triton

            if fits := convolution_triton.fits(x, opening):
                read, write = convolution_triton.read_columns, convolution_triton.write_columns
            ran("columns", *(("Triton",) if fits else ("general", f"no kernel for {x.dtype} and {opening}")))
        else:
            ran("columns", "general", turned_off() or without_triton(x, numel))
        columns, delta = read(x, self.order, opening)
        value, diagonal = run(columns, delta=delta)
        return write(value, diagonal, x, self.order)

    @torch.no_grad()
    def prepare(self, context: Tensor | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """`forward` without gradients at one context, for solvers: what does not depend on ``x`` is done once."""
        run, made = self._prepared(), dict[int, list[Tensor]]()

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
            pixels = x.shape[2] * x.shape[3]
            if pixels not in made:
                made[pixels] = self._offsets(context, pixels)
            return self._columns(lambda columns, delta: run(columns, made[pixels], delta), x)

        return evaluate

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if os.environ.get("QUARFLOW_KERNELS") == "0":
            ran("layers", "reference", turned_off())
            return convolutions(self, x, context)
        offsets = self._offsets(context, x.shape[2] * x.shape[3])
        return self._columns(lambda columns, delta: self._run(columns, offsets, delta), x)

    def extra_repr(self) -> str:
        return f"order={self.order!r}, {super().extra_repr()}"


def convolutions(net: TriangularConvNet, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``net(x, context)`` by masked convolutions: the readable reference.

    >>> net, x = TriangularConvNet(1, hidden=4).double(), torch.randn(2, 1, 3, 3, dtype=torch.float64)
    >>> all(torch.allclose(a, b) for a, b in zip(convolutions(net, x), net(x)))
    True
    """
    weights, blocks = net.matrices()
    first, middle, last = cast("tuple[WindowLinear, TriangularLinear, WindowLinear]", tuple(net.layers))
    kernels = [
        first.kernel(weights[0], net.order),
        weights[1][:, :, None, None],
        last.kernel(weights[2], net.order),
    ]
    c = None if context is None else context.mT
    centre = [TriangularLinear.offset(layer, c) for layer in (first, middle, last)]
    channels = net.features
    h, delta = x, torch.ones_like(x)[:, :, None]  # values (batch, units, H, W); their slopes (batch, C, units, H, W)
    acts = [net.opening, *net.activations]
    for i in range(4):
        act: Any = acts[i] if i < 3 else None
        if i:
            h = conv2d(h, kernels[i - 1], padding=kernels[i - 1].shape[-1] // 2) + centre[i - 1].mT[:, :, None, None]
            delta = torch.einsum("coi,bcihw->bcohw", blocks[i - 1], delta)
        if act is not None:
            # Activations take (channels, units, batch).
            groups = h.unflatten(1, (channels, -1)).permute(1, 2, 0, 3, 4)
            value, slope = (
                t.unflatten(2, (len(x), -1)).unflatten(3, x.shape[2:]).permute(2, 0, 1, 3, 4)
                for t in act(groups.flatten(2))
            )
            h, delta = value.flatten(1, 2), delta.repeat(1, 1, act.width, 1, 1) * slope
    return h, delta[:, :, 0]


def convolution_norm(kernel: Tensor, size: tuple[int, int], slack: float = 0.01) -> Tensor:
    """Certified bound of the spectral norm of a 3x3 ``conv2d`` with zeros around images of ``size``; differentiable.

    On images with one more pixel around, held at zero, it is a part of the circular convolution of these, whose norm
    is the largest of the matrices that the Fourier transform of the kernel has: `gram_norm` of each.

    Shapes: (out, in, 3, 3) -> ().

    >>> kernel = torch.zeros(1, 1, 3, 3).index_fill(3, torch.tensor([1]), 1.0)  # adds up three pixels of a column
    >>> 3 <= convolution_norm(kernel, (9, 9)).item() < 3.05
    True
    """
    height, width = size[0] + 2, size[1] + 2
    spectrum = torch.fft.rfft2(kernel, s=(height, width)).permute(2, 3, 0, 1).flatten(0, 1)
    # A complex matrix A + iB has the norm of the real [[A, -B], [B, A]]; the norm of its Gram matrix is that squared.
    gram = spectrum.mH @ spectrum if kernel.shape[0] >= kernel.shape[1] else spectrum @ spectrum.mH
    real = torch.cat([torch.cat([gram.real, -gram.imag], 2), torch.cat([gram.imag, gram.real], 2)], 1)
    eps = torch.finfo(kernel.dtype).eps
    return gram_norm(real, 2 * slack).amax().sqrt() * (1 + 64 * max(kernel.shape[:2]) * eps)


class ContractiveConvNet(nn.Module):
    """``x -> (F(x), None)`` for images, ``||dF/dx||_2 <= sigma``: the network of a residual flow (Chen et al. 2019).

        a = phi(x) (or x),   3x3,   phi,   1x1,   phi,   3x3

    As in `quarflow.nn.dense.ContractiveNet`: without the trick a layer above ``sigma^(1/3)`` is brought down to it;
    with it the last one is scaled by ``sigma / (theta_c + product of norms)``. Norms are certified
    (`convolution_norm`).

    Shapes: (batch, C, H, W) -> (batch, C, H, W), None.

    Args:
        channels: C.
        size: (H, W), on which the norms depend.
        hidden: units of each of the two hidden layers.
        context, activation, opening: as in `TriangularConvNet`; the activation of a width of one.
        sigma: the Lipschitz bound, in [0, 1).
        trick: the Lipschitz Trick, a learnable ``theta >= 0`` for each channel.

    >>> net = ContractiveConvNet(1, (3, 3), hidden=8, sigma=0.9).double()
    >>> x = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: net(x)[0].flatten())(x).view(9, 9)
    >>> bool(torch.linalg.matrix_norm(jacobian, 2) <= 0.9)
    True
    """

    def __init__(
        self,
        channels: int,
        size: tuple[int, int],
        hidden: int = 512,
        context: int = 0,
        activation: str = "lipswish",
        opening: bool = True,
        sigma: float = 0.97,
        trick: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("hidden", hidden), ("size", size[0]), ("size", size[1])):
            check_count(name, value)
        check_count("context", context, least=0)
        check_sigma(sigma)
        acts = [make_activation(activation) for _ in range(3)]
        if acts[0].width != 1:
            raise ValueError(f"activation: expected one of a width of one for images; got {activation!r}.")
        self.size, self.sigma, self.context_features = size, sigma, context
        self.opening = acts[0] if opening else None
        self.activations = nn.ModuleList(acts[1:])
        shapes = [(hidden, channels, 3), (hidden, hidden, 1), (channels, hidden, 3)]
        self.kernels = nn.ParameterList(
            nn.Parameter(torch.randn(out, read, side, side) / (read * side**2) ** 0.5) for out, read, side in shapes
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(out)) for out, _, _ in shapes)
        self.contexts = nn.ParameterList(
            nn.Parameter(torch.randn(out, context) / context**0.5) for out, _, _ in shapes if context
        )
        self.theta = nn.Parameter(torch.zeros(channels)) if trick else None

    def weights(self) -> list[Tensor]:
        """The kernels, scaled such that the product of their norms is at most sigma."""
        kernels = list(self.kernels)
        norms = [gram_norm(k[:, :, 0, 0]) if k.shape[-1] == 1 else convolution_norm(k, self.size) for k in kernels]
        if self.theta is None:
            share = self.sigma ** (1 / len(kernels))
            return [k * (share / n.clamp_min(max(share, floor(n)))) for k, n in zip(kernels, norms, strict=True)]
        total = (softplus(self.theta) + prod(norms[1:], start=norms[0])).clamp_min(floor(norms[0]))
        return [*kernels[:-1], kernels[-1] * (self.sigma / total)[:, None, None, None]]

    def _value(self, weights: Sequence[Tensor], x: Tensor, context: Tensor | None) -> Tensor:
        h = x if self.opening is None else self.opening(x)[0]
        for i, (kernel, bias) in enumerate(zip(weights, self.biases, strict=True)):
            if i:
                h = self.activations[i - 1](h)[0]
            h = conv2d(h, kernel, bias, padding=kernel.shape[-1] // 2)
            if context is not None and self.context_features:
                h = h + (context @ self.contexts[i].mT)[:, :, None, None]
        return h.to(x.dtype)

    def linearise(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``F(x)`` and ``v -> v^T dF/dx``, (batch, C, H, W) and (..., batch, C, H, W), both differentiable."""
        with without_autocast(x):
            weights = self.weights()
        return linearise(lambda x, context: (self._value(weights, x, context), None), x, context)

    @torch.no_grad()
    def prepare(self, context: Tensor | None = None) -> Callable[[Tensor], tuple[Tensor, None]]:
        """`forward` without gradients at one context, for solvers: the norms are taken once."""
        weights = self.weights()
        return lambda x: (self._value(weights, x, context), None)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, None]:
        with without_autocast(x):
            weights = self.weights()
        return self._value(weights, x, context), None

    def extra_repr(self) -> str:
        return f"size={self.size}, sigma={self.sigma}, trick={self.theta is not None}"
