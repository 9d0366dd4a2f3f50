"""`quarflow.nn.triangular.network` with its backward pass written out: half the time, a third of the memory.

Autograd would keep and revisit every factor of ``delta' = phi'(h) W delta``. Here the forward pass leaves, for each
layer, the value ``a``, the diagonal ``delta``, what stands for the slope ``phi'(h)``, and ``phi''(h) W delta``, in the
units of the activation (ELU's last two follow from the first two), with which the backward pass is two products for
each layer. Where hidden values are many and on a GPU, what happens between products is compiled, one pass each:

    g_h = g_a phi'(h) + g_delta phi''(h) W delta_before,      g_u = g_delta phi'(h)      (u = W delta_before)

The bound of the paths, ``p_l = |W_l| p_{l-1}``, and the scale ``sigma / (theta + p_L)`` are differentiated likewise.

Under `torch.autocast` everything between the layers, the diagonal too, is in its dtype; bound, scale, gradients of
parameters and what goes in and out keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quarflow.kernels import fused, fuses, products_dtype, ran, without_triton
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
    dtype, stairs = products_dtype(x), _on(x, stairs)
    why = _without_three(x, weights, offsets, activations, features)
    if not why:
        parts = tuple(None if p is WHOLE else tuple((s.start, s.stop) for s in p) for p in live)
        with torch.autocast(x.device.type, enabled=False):
            scaled, blocks = _scaled(sigma, shared, features, parts)(list(weights), list(masks), theta)
        return carry(x, scaled, blocks, offsets, activations, delta)
    ran("layers", "general", why)
    settings = (activations, masks, sigma, shared, features, theta is not None, delta is not None, live, stairs, dtype)
    theta = x.new_zeros(features) if theta is None else theta
    arrays = [x, theta, x if delta is None else delta, *weights, *offsets]
    with _plain(x, dtype):
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
    return scale[:, None].expand(-1, len(weight) // len(scale)).reshape(-1, 1)


def _forward(settings: Any, arrays: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    activations, masks, sigma, shared, features, trick, opened, live, stairs, dtype = settings
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
    x, scaled_weights, scaled_blocks, offsets, delta = _cast(dtype, x, *scaled, offsets, delta if opened else None)
    value, diagonal, kept = _carry(x, scaled_weights, scaled_blocks, offsets, activations, keep, delta, stairs)
    value, diagonal = value.to(theta.dtype), diagonal.to(theta.dtype)
    return value, diagonal, [scale, *steepest, *scaled_weights, scaled_blocks[-1], *kept] if keep else []


def _plain(x: Tensor, dtype: torch.dtype) -> AbstractContextManager[None]:
    """No autocast within: what is cast is said here."""
    return nullcontext() if dtype == x.dtype else torch.autocast(x.device.type, enabled=False)


def _cast(dtype: torch.dtype, *arrays: Any) -> Any:
    """Tensors of one dtype, lists of them and None, in another dtype."""
    tensors = (a[0] if isinstance(a, Sequence) else a for a in arrays if a is not None)
    if next(tensors).dtype == dtype:
        return arrays
    return [[t.to(dtype) for t in a] if isinstance(a, Sequence) else a if a is None else a.to(dtype) for a in arrays]


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
    dtype, stairs = products_dtype(x), _on(x, stairs)
    why = "more than one value of a coordinate in the first layer"
    if blocks[0].shape[2] == 1:
        why = _without_three(x, weights, offsets, activations, len(blocks[0]))
    ran("layers", *(("general", why) if why else ("Triton",)))
    if not why:
        from quarflow.kernels import triangular_triton

        arrays = [t.contiguous() for t in (x, x if delta is None else delta, *weights, *blocks, *offsets)]
        with _plain(x, dtype):
            if torch.is_grad_enabled() and any(t.requires_grad for t in arrays):
                return _Three.apply((activations, delta is not None, dtype), *arrays)
            rest = arrays[2:5], arrays[5:8], arrays[8:]
            given = None if delta is None else arrays[1]
            return triangular_triton.forward(arrays[0], *rest, activations, given, dtype)[:2]
    arrays = [x, x if delta is None else delta, *weights, *blocks, *offsets]
    with _plain(x, dtype):
        if torch.is_grad_enabled() and any(t.requires_grad for t in arrays):
            return _Carry.apply((activations, delta is not None, stairs, dtype), *arrays)
        a, weights, blocks, offsets, delta = _cast(dtype, x, weights, blocks, offsets, delta)
        value, diagonal, _ = _carry(a, weights, blocks, offsets, activations, False, delta, stairs)
    return value.to(x.dtype), diagonal.to(x.dtype)


def _without_three(
    x: Tensor, weights: Sequence[Tensor], offsets: Sequence[Tensor], activations: Sequence[Activation], features: int
) -> str:
    """Why the kernels for three layers on a GPU are not to run; empty if they are."""
    numel = len(weights[0]) * x.shape[-1]
    if not fuses(x, numel):
        return without_triton(x, numel)
    from quarflow.kernels import triangular_triton

    if triangular_triton.fits(x, weights, offsets, activations, features):
        return ""
    kinds = ", ".join(sorted({type(a).__name__ for a in activations}))
    return f"no kernel for {len(weights)} layers of {features} features, {kinds}, {x.dtype}, or for context"


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


# What is done to hidden values between two products.


def _activate(act: Activation, h: Tensor, u: Tensor, keep: bool) -> tuple[Tensor, ...]:
    """``phi(h)``, ``phi'(h) u``, and what `_differentiate` needs beside them; ``h`` may be overwritten."""
    value, s, curve = act.curves(h, keep and act.recall is None)
    if curve is None:
        return value, act.times_slope(u, s, out=s)
    return value, act.times_slope(u, s), s, torch.mul(curve, u, out=None if curve is value else curve)


def _differentiate(act: Activation, g: Tensor, g_delta: Tensor, value: Tensor, delta: Tensor, *more: Tensor) -> Any:
    """``(g_h, g_u)`` from the gradients of what `_activate` gave; both may be overwritten."""
    s, curve = more or act.recall(value, delta)
    g = act.times_slope(g, s, out=g).addcmul_(g_delta, curve, value=act.bend)
    return g, act.times_slope(g_delta, s, out=g_delta)


@cache
def _fused(kind: type[Activation], what: str, keep: bool) -> Callable[..., tuple[Tensor, ...]]:
    """`_activate` (with the offset of ``h``) or `_differentiate`, compiled: each value is read and written once."""
    act = kind()  # activations with `curves` have no parameters

    def activate(h: Tensor, offset: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return _activate(act, h + offset, u, keep)

    def differentiate(g: Tensor, g_delta: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _differentiate(act, g + 0, g_delta + 0, *rest)  # in place of copies
        return found

    made = activate if what == "activate" else differentiate
    return fused(made, f"{what}_{kind.__name__}_{keep}")


@cache
def _scaled(sigma: float, shared: bool, features: int, live: tuple[Any, ...]) -> Callable[..., Any]:
    """`quarflow.nn.triangular.scaled` of three layers, compiled."""
    from quarflow.nn.triangular import scaled

    parts = [WHOLE if part is None else (slice(*part[0]), slice(*part[1])) for part in live]

    def scale(weights: list[Tensor], masks: list[Tensor], theta: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        return scaled(weights, masks, theta, [1, 1], sigma, shared, features, parts)

    return fused(scale, f"scale_{features}", dynamic=False)


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
        u = block if delta is None else torch.bmm(block, delta)
        passes = fuses(x, weight.shape[:-1].numel() * batch)
        h = _product(weight, a, offset, 0 if passes else 1 / act.unit, unit / act.unit, panels)
        if passes:
            arrays = h, offset / act.unit, u.expand(-1, -1, batch)
            flat = _fused(cast("Any", type(act)), "activate", keep)(*(t.flatten(0, -2) for t in arrays))
            value, delta, *more = (t.view(features, -1, batch) for t in flat)
        else:
            value, delta, *more = _activate(act, h.view(features, -1, batch), u, keep)
        a, unit = value.view(h.shape), act.unit
        kept += [a, delta, *more] if keep else []
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
        a, before, *more = kept[-2 if act.recall else -4 :]
        kept = kept[: -2 if act.recall else -4]
        g_offsets[i] = _as_offset(g, offsets[i])
        g_weights[i] = _outer_product(g, a, stairs[i]).mul_(act.unit)
        g_blocks[i] = torch.bmm(g_u, before.mT)
        # The last layer's is an outer product.
        g_delta = blocks[i].mT * g_u if i == layers - 1 else torch.bmm(blocks[i].mT, g_u)
        back = _transposed_product(weights[i], g, stairs[i])
        if fuses(x, a.numel()):
            arrays = back, g_delta, a, before, *more
            found = _fused(cast("Any", type(act)), "differentiate", True)(*(t.flatten(0, -2) for t in arrays))
        else:
            found = _differentiate(act, back.view_as(before), g_delta, a.view_as(before), before, *more)
        g, g_u = found[0].view_as(a), found[1].view_as(before)
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
        activations, opened, stairs, dtype = settings
        layers = (len(arrays) - 2) // 3
        x, delta, *rest = _cast(dtype, *arrays)
        weights, blocks, offsets = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        value, diagonal, kept = _carry(
            x, weights, blocks, offsets, activations, True, delta if opened else None, stairs
        )
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value.to(arrays[0].dtype), diagonal.to(arrays[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        activations, opened, stairs, dtype = ctx.settings
        layers = len(activations) + 1
        saved = ctx.saved_tensors
        arrays, kept = saved[: 2 + 3 * layers], saved[2 + 3 * layers :]
        x, delta, *rest = arrays
        weights, blocks, offsets = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        first = delta if opened else None
        if torch.is_grad_enabled():
            from quarflow.nn.triangular import carry as reference

            outputs = reference(x, weights, blocks, offsets, activations, first)
            return _as_autograd(ctx, outputs, arrays, gradients)
        g, a, first, weights, blocks, offsets = _cast(dtype, gradients, x, first, weights, blocks, offsets)
        needed = ctx.needs_input_grad[1:3]
        found = _carry_backward(g, a, first, weights, blocks, offsets, activations, kept, needed, stairs)
        g_x, g_delta, *others = _cast(x.dtype, *found)
        return (None, g_x, g_delta, *(g for each in others for g in each))


class _Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        from quarflow.kernels import triangular_triton

        activations, opened, dtype = settings
        x, delta, *rest = arrays
        value, diagonal, kept = triangular_triton.forward(
            x, rest[:3], rest[3:6], rest[6:], activations, delta if opened else None, dtype
        )
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value, diagonal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from quarflow.kernels import triangular_triton

        activations, opened, _ = ctx.settings
        saved = ctx.saved_tensors
        arrays, kept = saved[:11], saved[11:]
        x, delta, *rest = arrays
        first, parts = delta if opened else None, (rest[:3], rest[3:6], rest[6:])
        if torch.is_grad_enabled():
            from quarflow.nn.triangular import carry as reference

            return _as_autograd(ctx, reference(x, *parts, activations, first), arrays, gradients)
        value, diagonal = (g.contiguous() for g in gradients)
        return (None, *triangular_triton.backward(value, diagonal, x, *parts, activations, first, kept))


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        value, diagonal, kept = _forward(settings, arrays, keep=True)
        ctx.settings = settings
        ctx.save_for_backward(*arrays, *kept)
        return value, diagonal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        activations, masks, sigma, shared, features, trick, opened, live, stairs, dtype = ctx.settings
        layers = len(masks)
        saved = ctx.saved_tensors  # once: after recomputation it is there no second time
        arrays, kept = saved[: 3 + 2 * layers], saved[3 + 2 * layers :]
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
        g, a, first, offsets, scaled = _cast(dtype, gradients, x, first, offsets, [*blocks[:-1], last])
        found = _carry_backward(g, a, first, masked, scaled, offsets, activations, kept, needed, stairs)
        g_x, g_first, g_weights, g_blocks, g_offsets = _cast(theta.dtype, *found)
        # W_L = scale * W: what flows to the scale, and on to W through it.
        g_scale = (g_weights[-1] * rest[layers - 1] * masks[-1]).sum(1).view(features, -1).sum(1)
        g_scale = g_scale + (g_blocks[-1] * blocks[-1]).sum((1, 2))
        g_weights[-1], g_blocks[-1] = g_weights[-1] * _by_row(scale, g_weights[-1]), g_blocks[-1] * scale[:, None, None]

        g_bound = g_scale * scale.square() / -sigma if sigma else torch.zeros_like(scale)
        g_theta = g_bound * torch.sigmoid(theta) if trick else None
        if shared:
            top = steepest[-1].flatten().argmax(0, keepdim=True)
            g_bound = torch.zeros_like(g_bound).scatter(0, top, g_bound.sum(0, keepdim=True))
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
