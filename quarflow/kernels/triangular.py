"""`quarflow.nn.triangular.network` with its backward pass written out: half the time, a third of the memory.

Autograd would keep and revisit every factor of ``delta' = phi'(h) W delta``. Here the forward pass leaves, for each
layer, the value ``a`` (in the unit of its activation), the diagonal ``delta``, the slope ``phi'(h)`` and
``phi''(h) W delta``, with which the backward pass is two products for each layer:

    g_h = g_a phi'(h) + g_delta phi''(h) W delta_before,      g_u = g_delta phi'(h)      (u = W delta_before)

The bound of the paths, ``p_l = |W_l| p_{l-1}``, and the scale ``sigma / (theta + p_L)`` are differentiated likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quarflow.nn.activations import Activation
from quarflow.nn.bounds import floor, safety
from quarflow.nn.masks import WHOLE, Live


def network(
    x: Tensor,
    weights: Sequence[Tensor],
    masks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    theta: Tensor | None,
    activations: Sequence[Activation],
    sigma: float,
    shared: bool,
    features: int,
    delta: Tensor | None = None,
    live: Sequence[Live] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `quarflow.nn.triangular.network`; every activation must have ``curves`` and a width of one."""
    live = [WHOLE] * len(weights) if live is None else live
    settings = (activations, masks, sigma, shared, features, theta is not None, delta is not None, live)
    theta = x.new_zeros(features) if theta is None else theta
    arrays = [x, theta, x if delta is None else delta, *weights, *offsets]
    if torch.is_grad_enabled() and any(t.requires_grad for t in arrays):
        return _Network.apply(settings, *arrays)
    return _forward(settings, arrays, keep=False)[:2]


def _blocks(weight: Tensor, features: int, live: Live) -> Tensor:
    """The diagonal blocks (features, out, in) of a contiguous weight, or the ``live`` part of each, as a view."""
    rows, columns = weight.shape
    out, read = rows // features, columns // features
    blocks = weight.as_strided((features, out, read), (out * columns + read, columns, 1))
    return blocks if live is WHOLE else blocks[:, live[0], live[1]]


def _by_row(scale: Tensor, weight: Tensor) -> Tensor:
    """A number for each coordinate as one for each row of the last layer: (rows, 1)."""
    return (scale if len(scale) == len(weight) else scale.repeat_interleave(len(weight) // len(scale)))[:, None]


def _forward(settings: Any, arrays: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    activations, masks, sigma, shared, features, trick, opened, live = settings
    x, theta, delta, *rest = arrays
    weights, offsets = rest[: len(masks)], rest[len(masks) :]
    blocks = [_blocks(w, features, part) for w, part in zip(weights, live, strict=True)]
    steepest = [blocks[0].abs()]
    for block in blocks[1:]:
        steepest.append(torch.bmm(block.abs(), steepest[-1]))
    bound = steepest[-1].flatten() * safety(blocks)
    bound = bound.amax().expand(features) if shared else bound
    scale = sigma / (bound + softplus(theta) if trick else bound).clamp_min(floor(x))
    masked = [w * m for w, m in zip(weights, masks, strict=True)]
    last = masked[-1] * _by_row(scale, masked[-1]), blocks[-1] * scale[:, None, None]
    scaled = [*masked[:-1], last[0]], [*blocks[:-1], last[1]]
    value, diagonal, kept = _carry(x, *scaled, offsets, activations, keep, delta if opened else None)
    return value, diagonal, [scale, *steepest, *masked, *kept] if keep else []


def carry(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `quarflow.nn.triangular.carry`, without gradients; every activation must have ``curves``."""
    with torch.no_grad():
        return _carry(x, weights, blocks, offsets, activations, keep=False, delta=delta)[:2]


def _carry(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    keep: bool,
    delta: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    features, batch = len(blocks[0]), x.shape[1]
    a, unit = x, 1.0
    kept: list[Tensor] = []
    for weight, block, offset, act in zip(weights, blocks, offsets, activations, strict=False):
        # ``unit * a`` is the value before, and ``act.unit * h`` the one here.
        offset = offset if act.unit == 1 else offset / act.unit
        h = torch.addmm(offset, weight, a, alpha=unit / act.unit).view(features, -1, batch)
        u = block if delta is None else torch.bmm(block, delta)
        value, slope, curve = act.curves(h, keep)
        if keep:
            delta = slope * u
            kept += [value.view(-1, batch), delta, slope, curve.mul_(u)]
        else:
            delta = slope.mul_(u)
        a, unit = value.view(-1, batch), act.unit
    value = torch.addmm(offsets[-1], weights[-1], a, alpha=unit)
    return value, torch.bmm(blocks[-1], cast("Tensor", delta)).squeeze(1), kept


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        value, diagonal, kept = _forward(settings, arrays, keep=True)
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value, diagonal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        activations, masks, sigma, shared, features, trick, opened, live = ctx.settings
        layers = len(masks)
        arrays, kept = ctx.saved_tensors[: 3 + 2 * layers], ctx.saved_tensors[3 + 2 * layers :]
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, arrays, gradients)
        x, theta, first, *rest = arrays
        offsets, batch = rest[layers:], x.shape[1]
        scale, *kept = kept
        steepest, masked, kept = kept[:layers], kept[layers : 2 * layers], kept[2 * layers :]
        blocks = [_blocks(w, features, part) for w, part in zip(rest[:layers], live, strict=True)]

        g, g_u = gradients[0], gradients[1].unsqueeze(1)
        g_weights: list[Tensor] = [x] * layers
        g_blocks: list[Tensor] = [x] * layers
        g_offsets: list[Tensor] = [x] * layers
        for i in range(layers - 1, 0, -1):
            a, delta, slope, curve = kept[4 * i - 4 : 4 * i]
            g_offsets[i] = g.sum(1, keepdim=True) if offsets[i].shape[1] == 1 else g
            g_weights[i] = (g @ a.mT).mul_(activations[i - 1].unit)
            g_blocks[i] = torch.bmm(g_u, delta.mT)
            if i == layers - 1:
                # W_L = scale * W: what flows to the scale, and on to W through it.
                by_row = _by_row(scale, g)
                g_scale = (g_weights[i] * masked[i]).sum(1).view(features, -1).sum(1)
                g_scale = g_scale + (g_blocks[i] * blocks[i]).sum((1, 2))
                g_weights[i], g_blocks[i] = g_weights[i] * by_row, g_blocks[i] * scale[:, None, None]
                g, g_u = g * by_row, g_u * scale[:, None, None]
                g_delta = blocks[i].mT * g_u  # an outer product
            else:
                g_delta = torch.bmm(blocks[i].mT, g_u)
            g = (masked[i].mT @ g).view_as(slope).mul_(slope).addcmul_(g_delta, curve).view(-1, batch)
            g_u = g_delta.mul_(slope)
        g_offsets[0] = g.sum(1, keepdim=True) if offsets[0].shape[1] == 1 else g
        g_weights[0] = g @ x.mT
        g_blocks[0] = torch.bmm(g_u, first.mT) if opened else g_u.sum(2, keepdim=True)
        g_x = masked[0].mT @ g if ctx.needs_input_grad[1] else None
        g_first = torch.bmm(blocks[0].mT, g_u) if opened and ctx.needs_input_grad[3] else None

        g_bound = g_scale * scale.square() / -sigma if sigma else torch.zeros_like(scale)
        g_theta = g_bound * torch.sigmoid(theta) if trick else None
        if shared:
            top = torch.zeros_like(g_bound)
            top[steepest[-1].flatten().argmax()] = g_bound.sum()
            g_bound = top
        g_steepest = (g_bound * safety(blocks))[:, None, None]
        for i in range(layers - 1, 0, -1):
            g_blocks[i] = torch.addcmul(g_blocks[i], blocks[i].sign(), g_steepest * steepest[i - 1].mT)
            g_steepest = blocks[i].abs().mT @ g_steepest
        g_blocks[0] = torch.addcmul(g_blocks[0], blocks[0].sign(), g_steepest)
        for g_weight, mask, g_block, part in zip(g_weights, masks, g_blocks, live, strict=True):
            _blocks(g_weight.mul_(mask), features, part).add_(g_block)
        return (None, g_x, g_theta, g_first, *g_weights, *g_offsets)


def _differentiable_backward(ctx: Any, arrays: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    """The backward pass as autograd makes it from the reference: for second derivatives."""
    from quarflow.nn.triangular import network as reference

    activations, masks, sigma, shared, features, trick, opened, live = ctx.settings
    x, theta, delta, *rest = arrays
    weights, offsets = rest[: len(masks)], rest[len(masks) :]
    optional = theta if trick else None, delta if opened else None
    outputs = reference(
        x, weights, masks, offsets, optional[0], activations, sigma, shared, features, optional[1], live
    )
    inputs = [t for t, needed in zip(arrays, ctx.needs_input_grad[1:], strict=True) if needed]
    found = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True))
    return (None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:]))
