"""`quarflow.nn.triangular.network` with its backward pass written out: half the time, a third of the memory.

Autograd would keep and revisit every factor of ``delta' = phi'(h) W delta``. Here the forward pass leaves, for each
layer, the value ``a``, the diagonal ``delta``, what stands for the slope ``phi'(h)``, and ``phi''(h) W delta``, in the
units of the activation, with which the backward pass is two products for each layer:

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
from quarflow.nn.masks import WHOLE, Live, Panels


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
    stairs: Sequence[Panels] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `quarflow.nn.triangular.network`; every activation must have ``curves`` and a width of one."""
    live = [WHOLE] * len(weights) if live is None else live
    settings = (activations, masks, sigma, shared, features, theta is not None, delta is not None, live, _on(x, stairs))
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
    activations, masks, sigma, shared, features, trick, opened, live, stairs = settings
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
    value, diagonal, kept = _carry(x, *scaled, offsets, activations, keep, delta if opened else None, stairs)
    return value, diagonal, [scale, *steepest, *scaled[0], last[1], *kept] if keep else []


def carry(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    delta: Tensor | None = None,
    stairs: Sequence[Panels] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `quarflow.nn.triangular.carry`; every activation must have ``curves``."""
    arrays, stairs = [x, x if delta is None else delta, *weights, *blocks, *offsets], _on(x, stairs)
    if torch.is_grad_enabled() and any(t.requires_grad for t in arrays):
        return _Carry.apply((activations, delta is not None, stairs), *arrays)
    return _carry(x, weights, blocks, offsets, activations, False, delta, stairs)[:2]


def _on(x: Tensor, stairs: Sequence[Panels] | None) -> Sequence[Panels] | None:
    """On a GPU one large product takes less time than many that leave out half of it."""
    return stairs if x.device.type == "cpu" else None


# Products with a weight, panel by panel: ``beta b + alpha W a``, ``W^T g``, and the part of ``g a^T`` that counts.


def _product(weight: Tensor, a: Tensor, offset: Tensor, beta: float, alpha: float, panels: Panels) -> Tensor:
    if len(panels) < 2:
        product = torch.addmm if weight.ndim == 2 else torch.baddbmm
        return product(offset, weight, a, beta=beta, alpha=alpha)
    out = a.new_empty(len(weight), a.shape[1])
    for r0, r1, _, c1 in panels:
        torch.addmm(offset[r0:r1], weight[r0:r1, :c1], a[:c1], beta=beta, alpha=alpha, out=out[r0:r1])
    return out


def _transposed_product(weight: Tensor, g: Tensor, panels: Panels) -> Tensor:
    if len(panels) < 2:
        return weight.mT @ g
    out = g.new_empty(weight.shape[1], g.shape[1])
    for r0, _, c0, c1 in panels:
        torch.mm(weight[r0:, c0:c1].mT, g[r0:], out=out[c0:c1])
    return out


def _outer_product(g: Tensor, a: Tensor, panels: Panels) -> Tensor:
    if len(panels) < 2:
        return g @ a.mT
    out = g.new_zeros(len(g), len(a))
    for r0, r1, _, c1 in panels:
        torch.mm(g[r0:r1], a[:c1].mT, out=out[r0:r1, :c1])
    return out


def _carry(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    keep: bool,
    delta: Tensor | None,
    stairs: Sequence[Panels] | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    features, batch = len(blocks[0]), x.shape[-1]
    stairs = [()] * len(weights) if stairs is None else stairs
    a, unit = x, 1.0
    kept: list[Tensor] = []
    for weight, block, offset, act, panels in zip(weights, blocks, offsets, activations, stairs, strict=False):
        # ``unit * a`` is the value before, and ``act.unit * h`` the one here.
        h = _product(weight, a, offset, 1 / act.unit, unit / act.unit, panels).view(features, -1, batch)
        u = block if delta is None else torch.bmm(block, delta)
        value, s, curve = act.curves(h, keep)
        if keep:
            delta = act.times_slope(u, s)
            curve = torch.mul(curve, u, out=None if curve is value else curve)
            kept += [value.flatten(0, 1) if x.ndim == 2 else value, delta, s, curve]
        else:
            delta = act.times_slope(u, s, out=s)
        a, unit = value.flatten(0, 1) if x.ndim == 2 else value, act.unit
    value = _product(weights[-1], a, offsets[-1], 1.0, unit, stairs[-1])
    return value, torch.bmm(blocks[-1], cast("Tensor", delta)).squeeze(1), kept


def _carry_backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    delta: Tensor | None,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    kept: Sequence[Tensor],
    needed: tuple[bool, bool],
    stairs: Sequence[Panels] | None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of `_carry` for ``x`` and ``delta`` (where ``needed``), weights, blocks and offsets."""
    layers = len(weights)
    stairs = [()] * layers if stairs is None else stairs
    g, g_u = gradients[0], gradients[1].unsqueeze(1)
    g_weights: list[Tensor] = [x] * layers
    g_blocks: list[Tensor] = [x] * layers
    g_offsets: list[Tensor] = [x] * layers
    for i in range(layers - 1, 0, -1):
        act = activations[i - 1]
        a, before, s, curve = kept[4 * i - 4 : 4 * i]
        g_offsets[i] = _as_offset(g, offsets[i])
        g_weights[i] = _outer_product(g, a, stairs[i]).mul_(act.unit)
        g_blocks[i] = torch.bmm(g_u, before.mT)
        # The last layer's is an outer product.
        g_delta = blocks[i].mT * g_u if i == layers - 1 else torch.bmm(blocks[i].mT, g_u)
        g = act.times_slope(back := _transposed_product(weights[i], g, stairs[i]).view_as(s), s, out=back)
        g = g.addcmul_(g_delta, curve, value=act.bend).view_as(a)
        g_u = act.times_slope(g_delta, s, out=g_delta)
    g_offsets[0] = _as_offset(g, offsets[0])
    g_weights[0] = _outer_product(g, x, stairs[0])
    g_blocks[0] = g_u.sum(2, keepdim=True) if delta is None else torch.bmm(g_u, delta.mT)
    g_x = _transposed_product(weights[0], g, stairs[0]) if needed[0] else None
    g_delta_in = torch.bmm(blocks[0].mT, g_u) if delta is not None and needed[1] else None
    return g_x, g_delta_in, g_weights, g_blocks, g_offsets


def _as_offset(g: Tensor, offset: Tensor) -> Tensor:
    return g.sum(-1, keepdim=True) if offset.shape[-1] == 1 else g


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        activations, opened, stairs = settings
        layers = (len(arrays) - 2) // 3
        x, delta, *rest = arrays
        weights, blocks, offsets = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        value, diagonal, kept = _carry(
            x, weights, blocks, offsets, activations, True, delta if opened else None, stairs
        )
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value, diagonal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        activations, opened, stairs = ctx.settings
        layers = len(activations) + 1
        arrays, kept = ctx.saved_tensors[: 2 + 3 * layers], ctx.saved_tensors[2 + 3 * layers :]
        x, delta, *rest = arrays
        weights, blocks, offsets = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        first = delta if opened else None
        if torch.is_grad_enabled():
            from quarflow.nn.triangular import carry as reference

            outputs = reference(x, weights, blocks, offsets, activations, first)
            return _as_autograd(ctx, outputs, arrays, gradients)
        g_x, g_delta, *others = _carry_backward(
            gradients, x, first, weights, blocks, offsets, activations, kept, ctx.needs_input_grad[1:3], stairs
        )
        return (None, g_x, g_delta, *(g for each in others for g in each))


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        value, diagonal, kept = _forward(settings, arrays, keep=True)
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value, diagonal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        activations, masks, sigma, shared, features, trick, opened, live, stairs = ctx.settings
        layers = len(masks)
        arrays, kept = ctx.saved_tensors[: 3 + 2 * layers], ctx.saved_tensors[3 + 2 * layers :]
        x, theta, delta, *rest = arrays
        offsets, first = rest[layers:], delta if opened else None
        if torch.is_grad_enabled():
            from quarflow.nn.triangular import network as reference

            outputs = reference(
                x,
                rest[:layers],
                masks,
                offsets,
                theta if trick else None,
                activations,
                sigma,
                shared,
                features,
                first,
                live,
            )
            return _as_autograd(ctx, outputs, arrays, gradients)
        scale, *kept = kept
        steepest, masked, (last, *kept) = kept[:layers], kept[layers : 2 * layers], kept[2 * layers :]
        blocks = [_blocks(w, features, part) for w, part in zip(rest[:layers], live, strict=True)]
        needed = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        g_x, g_first, g_weights, g_blocks, g_offsets = _carry_backward(
            gradients, x, first, masked, [*blocks[:-1], last], offsets, activations, kept, needed, stairs
        )
        # W_L = scale * W: what flows to the scale, and on to W through it.
        g_scale = (g_weights[-1] * rest[layers - 1] * masks[-1]).sum(1).view(features, -1).sum(1)
        g_scale = g_scale + (g_blocks[-1] * blocks[-1]).sum((1, 2))
        g_weights[-1], g_blocks[-1] = g_weights[-1] * _by_row(scale, g_weights[-1]), g_blocks[-1] * scale[:, None, None]

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


def _as_autograd(
    ctx: Any, outputs: Sequence[Tensor], arrays: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The backward pass as autograd makes it from the reference's ``outputs``: for second derivatives."""
    inputs = [t for t, needed in zip(arrays, ctx.needs_input_grad[1:], strict=True) if needed]
    found = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True))
    return (None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:]))
