"""`quarflow.nn.convolution.read_columns` and `write_columns` on a GPU, one kernel each way.

    columns[c, t, p] = phi(x[c, p + tap_t])          gathers; so does the gradient of what is added up
    out[c, p] = sum_t columns[c, t, p + tap_t]       adds up; so does the gradient of what was gathered, times phi'
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quarflow.kernels.triangular_triton import KINDS, _curves
from quarflow.nn.activations import Activation
from quarflow.nn.masks import CENTRE, TAPS

WIDE = 512  # pixels of a program
NONE = -1  # no activation


@triton.jit
def _place(p, t, code, sign, height: tl.constexpr, width: tl.constexpr):
    """Where in its image the neighbour ``sign * tap_t`` of pixel ``p`` is, and whether it is inside."""
    tap = ((code >> (4 * t)) & 15).to(tl.int32)
    y = (p // width) % height + sign * (tap // 3 - 1)
    x = p % width + sign * (tap % 3 - 1)
    return y * width + x, (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def _gather(
    images, columns, slopes, code, pixels, sign: tl.constexpr,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, taps: tl.constexpr, centre: tl.constexpr,
    KIND: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c, t = tl.program_id(1) // taps, tl.program_id(1) % taps
    at, there = _place(p, t, code, sign, height, width)
    image = p // (height * width)
    value = tl.load(images + (image * channels + c) * (height * width) + at, mask=there & (p < pixels), other=0.0)
    if KIND >= 0:
        value, slope, _ = _curves(value, KIND)
        if t == centre:
            tl.store(slopes + c * pixels + p, slope, mask=p < pixels)
    tl.store(columns + tl.program_id(1) * pixels + p, value, mask=p < pixels)


@triton.jit
def _add_up(
    columns, images, x, g_slopes, code, pixels, sign: tl.constexpr,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, taps: tl.constexpr,
    KIND: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1)
    image = p // (height * width)
    total = tl.zeros((BP,), tl.float32)
    for t in range(taps):
        at, there = _place(p, t, code, sign, height, width)
        at = columns + (c * taps + t) * pixels + image * (height * width) + at
        total += tl.load(at, mask=there & (p < pixels), other=0.0)
    to = (image * channels + c) * (height * width) + p % (height * width)
    if KIND >= 0:
        _, slope, curve = _curves(tl.load(x + to, mask=p < pixels, other=0.0), KIND)
        total = total * slope + curve * tl.load(g_slopes + c * pixels + p, mask=p < pixels, other=0.0)
    tl.store(images + to, total, mask=p < pixels)


def fits(x: Tensor, opening: Activation | None) -> bool:
    """Whether these kernels are for such images and activation."""
    return x.dtype == torch.float32 and (opening is None or type(opening) in KINDS)


def _sizes(shape: torch.Size, order: str) -> tuple[int, int, tuple[int, int, int, int]]:
    """The taps as a number, the pixels, and (channels, height, width, taps)."""
    taps = TAPS[order]
    code = sum((3 * (dy + 1) + dx + 1) << (4 * t) for t, (dy, dx) in enumerate(taps))
    batch, channels, height, width = shape
    return code, batch * height * width, (channels, height, width, len(taps))


def gather(x: Tensor, order: str, kind: int = NONE, sign: int = 1) -> tuple[Tensor, Tensor]:
    """Columns of ``phi(x)``, (C * taps, pixels), and ``phi'(x)``, (C, pixels); there ``phi`` of zero is zero."""
    code, pixels, sizes = _sizes(x.shape, order)
    columns = x.new_empty(sizes[0] * sizes[3], pixels)
    slopes = columns if kind == NONE else x.new_empty(sizes[0], pixels)
    grid = triton.cdiv(pixels, WIDE), len(columns)
    _gather[grid](x.contiguous(), columns, slopes, code, pixels, sign, *sizes, CENTRE, kind, WIDE, num_warps=4)
    return columns, slopes


def add_up(
    columns: Tensor, like: Tensor, order: str, kind: int = NONE, sign: int = 1, g_slopes: Tensor | None = None
) -> Tensor:
    """Columns added up where they belong, for images ``like`` these; times ``phi'``, plus ``phi''`` times the other."""
    code, pixels, sizes = _sizes(like.shape, order)
    images = torch.empty_like(like, memory_format=torch.contiguous_format)
    grid = triton.cdiv(pixels, WIDE), sizes[0]
    other = columns if g_slopes is None else g_slopes.contiguous()
    x = like.contiguous()
    _add_up[grid](columns.contiguous(), images, x, other, code, pixels, sign, *sizes, kind, WIDE, num_warps=4)
    return images


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: str, opening: Activation | None) -> tuple[Tensor, Tensor]:
        ctx.order, ctx.opening = order, opening
        ctx.save_for_backward(x)
        if opening is not None:
            return gather(x, order, KINDS[type(opening)])
        slopes = x.new_empty(0)
        ctx.mark_non_differentiable(slopes)
        return gather(x, order)[0], slopes

    @staticmethod
    def backward(ctx: Any, g_columns: Tensor, g_slopes: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        opening = ctx.opening
        if torch.is_grad_enabled():  # for second derivatives: as autograd makes it from the reference
            from quarflow.nn.convolution import read_columns as reference

            columns, slopes = reference(x, ctx.order, opening)
            outputs = [columns] if slopes is None else [columns, slopes[:, 0]]
            gradients = [g_columns, g_slopes][: len(outputs)]
            return torch.autograd.grad(outputs, x, gradients, create_graph=True)[0], None, None
        if opening is None:
            return add_up(g_columns, x, ctx.order, sign=-1), None, None
        return add_up(g_columns, x, ctx.order, KINDS[type(opening)], -1, g_slopes), None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor, order: str) -> Tensor:
        ctx.order = order
        return add_up(value, like, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # as in `_Read`
            from quarflow.nn.convolution import gather as reference

            taps = [(-dy, -dx) for dy, dx in TAPS[ctx.order]]
            columns = reference(gradient.transpose(0, 1)[:, None], taps)
            return columns.reshape(columns.shape[0] * len(taps), -1), None, None
        return gather(gradient, ctx.order, sign=-1)[0], None, None


def read_columns(x: Tensor, order: str, opening: Activation | None = None) -> tuple[Tensor, Tensor | None]:
    """As `quarflow.nn.convolution.read_columns`, for an activation in `KINDS`."""
    columns, slopes = _Read.apply(x, order, opening)
    return columns, None if opening is None else slopes[:, None]


def write_columns(value: Tensor, diagonal: Tensor, x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """As `quarflow.nn.convolution.write_columns`."""
    batch, channels, height, width = x.shape
    out = _Write.apply(value, x.detach(), order)
    return out, diagonal.view(channels, batch, height, width).transpose(0, 1)
