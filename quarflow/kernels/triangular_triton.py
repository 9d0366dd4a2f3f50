"""`quarflow.nn.triangular.carry` of three layers on a GPU: what lies around the product of the middle, in four kernels.

    h1 = W1 x + b1,     a1 = phi(h1),     delta1 = phi'(h1) B1 delta          `_open`
    h2 = W2 a1,         u2 = B2 delta1                                        two products of torch
    a2 = phi(h2 + b2),  value = W3 a2 + b3,  diagonal = B3 phi'(h2 + b2) u2   `_close`

The outer layers of a network for images read and write a few numbers a pixel, but its hidden values are hundreds: so
they are made where they are used, and only ``a1, delta1, h2, u2`` ever reach memory. The backward pass makes the others
again (`_open_backward`, `_close_backward`). Sums over pixels go into one part for each program, added up afterwards: no
atomics, so a step repeats bit for bit.

Arrays are (rows, pixels). Parameters, what comes in and what goes out are float32; hidden values and the factors of
products are float32 or bfloat16, sums float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quarflow.nn.activations import ELU, Activation, Sine, Tanh, Wave

KINDS: dict[type[Activation], int] = {ELU: 0, Tanh: 1, Sine: 2, Wave: 3}
WIDEST = 512  # rows that the first layer reads, or the last one writes
FEATURES = 64  # coordinates with a diagonal of their own
WHOLE_BELOW = 64  # units for each of them: then their blocks are multiplied as one matrix

# By the bytes of a number: up to so many rows read or written, the hidden rows and the pixels of a program, its warps,
# and how many loads it keeps in flight.
TILES: dict[str, dict[int, list[tuple[int, int, int, int, int]]]] = {
    "open": {2: [(WIDEST, 64, 64, 4, 3)], 4: [(WIDEST, 64, 64, 8, 2)]},
    "close": {2: [(WIDEST, 32, 64, 4, 3)], 4: [(WIDEST, 32, 64, 8, 2)]},
    "close_backward": {
        2: [(128, 64, 32, 4, 3), (256, 64, 32, 8, 2), (WIDEST, 32, 32, 8, 2)],
        4: [(64, 32, 32, 4, 2), (256, 16, 32, 8, 1), (WIDEST, 16, 16, 8, 1)],
    },
    "open_backward": {
        2: [(128, 64, 32, 4, 3), (256, 64, 32, 8, 2), (WIDEST, 32, 32, 8, 1)],
        4: [(64, 32, 32, 8, 1), (256, 16, 32, 8, 1), (WIDEST, 16, 16, 8, 1)],
    },
}


@triton.jit
def _curves(h, KIND: tl.constexpr):
    """phi(h), phi'(h), phi''(h)."""
    if KIND == 0:
        e = tl.exp(tl.minimum(h, 0.0))
        up = h > 0
        return tl.where(up, h, e - 1), tl.where(up, 1.0, e), tl.where(up, 0.0, e)
    elif KIND == 1:
        t = 2 * tl.sigmoid(2 * h) - 1
        s = 1 - t * t
        return t, s, -2 * t * s
    elif KIND == 2:
        s = tl.sin(h)
        return s, tl.cos(h), -s
    else:
        m = h / 6.4
        m = m - tl.floor(m + 0.5)
        a = tl.abs(m)
        return 6.4 * m * (1 - 2 * a), 1 - 4 * a, tl.where(m > 0, -0.625, tl.where(m < 0, 0.625, 0.0))


@triton.jit
def _open(
    x, w, b, block, delta, a_out, d_out, pixels,
    rows: tl.constexpr, reads: tl.constexpr, units: tl.constexpr,
    GIVEN: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    kind = a_out.dtype.element_ty
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    inside, row = p < pixels, r < rows
    h = tl.zeros((BR, BP), tl.float32)
    for k0 in range(0, reads, BK):
        k = k0 + tl.arange(0, BK)
        read = k < reads
        xs = tl.load(x + k[:, None] * pixels + p[None, :], mask=read[:, None] & inside[None, :], other=0.0)
        ws = tl.load(w + r[:, None] * reads + k[None, :], mask=row[:, None] & read[None, :], other=0.0)
        h = tl.dot(ws.to(kind), xs.to(kind), h, input_precision=HOW)
    h += tl.load(b + r, mask=row, other=0.0)[:, None]
    value, slope, _ = _curves(h, KIND)
    slope *= tl.load(block + r, mask=row, other=0.0)[:, None]
    where = r[:, None] * pixels + p[None, :]
    here = row[:, None] & inside[None, :]
    if GIVEN:
        slope *= tl.load(delta + (r // units)[:, None] * pixels + p[None, :], mask=here, other=0.0)
    tl.store(a_out + where, value.to(kind), mask=here)
    tl.store(d_out + where, slope.to(kind), mask=here)


@triton.jit
def _open_backward(
    x, w, b, block, delta, g_a, g_d, g_x, g_delta, g_w, pixels,
    rows: tl.constexpr, reads: tl.constexpr, units: tl.constexpr, features: tl.constexpr,
    GIVEN: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr, TILES: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    kind = g_a.dtype.element_ty
    group, program = tl.program_id(0), tl.program_id(1)
    r, k, c = group * BR + tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, BC)
    row, read = r < rows, k < reads
    ws = tl.load(w + r[:, None] * reads + k[None, :], mask=row[:, None] & read[None, :], other=0.0).to(kind)
    bias = tl.load(b + r, mask=row, other=0.0)[:, None]
    weight = tl.load(block + r, mask=row, other=0.0)
    w_sum = tl.zeros((BR, BK), tl.float32)
    b_sum = tl.zeros((BR,), tl.float32)
    block_sum = tl.zeros((BR,), tl.float32)
    for tile in range(TILES):
        p = (program * TILES + tile) * BP + tl.arange(0, BP)
        inside = p < pixels
        where, here = r[:, None] * pixels + p[None, :], row[:, None] & inside[None, :]
        xs = tl.load(x + k[:, None] * pixels + p[None, :], mask=read[:, None] & inside[None, :], other=0.0).to(kind)
        _, slope, curve = _curves(tl.dot(ws, xs, input_precision=HOW) + bias, KIND)
        ga = tl.load(g_a + where, mask=here, other=0.0).to(tl.float32)
        gd = tl.load(g_d + where, mask=here, other=0.0).to(tl.float32)
        gu = gd * slope
        bent = gd * curve * weight[:, None]
        if GIVEN:
            known = tl.load(delta + (r // units)[:, None] * pixels + p[None, :], mask=here, other=0.0)
            bent *= known
            block_sum += tl.sum(gu * known, 1)
            of = tl.where((c[:, None] == (r // units)[None, :]) & row[None, :], weight[None, :], 0.0)
            found = tl.dot(of.to(kind), gu.to(kind), input_precision=HOW)
            to = g_delta + (group * features + c)[:, None] * pixels + p[None, :]
            tl.store(to, found, mask=(c < features)[:, None] & inside[None, :])
        else:
            block_sum += tl.sum(gu, 1)
        gh = ga * slope + bent
        b_sum += tl.sum(gh, 1)
        w_sum = tl.dot(gh.to(kind), tl.trans(xs), w_sum, input_precision=HOW)
        found = tl.dot(tl.trans(ws), gh.to(kind), input_precision=HOW)
        to = g_x + (group * reads + k)[:, None] * pixels + p[None, :]
        tl.store(to, found, mask=read[:, None] & inside[None, :])
    to = g_w + (program * rows + r) * (reads + 2)
    tl.store(to[:, None] + k[None, :], w_sum, mask=row[:, None] & read[None, :])
    tl.store(to + reads, b_sum, mask=row)
    tl.store(to + reads + 1, block_sum, mask=row)


@triton.jit
def _close(
    h_in, u_in, b, w, w_bias, block, value, diagonal, pixels,
    rows: tl.constexpr, writes: tl.constexpr, units: tl.constexpr, features: tl.constexpr,
    KIND: tl.constexpr, HOW: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    kind = h_in.dtype.element_ty
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    inside, write = p < pixels, m < writes
    total = tl.zeros((BM, BP), tl.float32)
    slopes = tl.zeros((BC, BP), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        row = r < rows
        where, here = r[:, None] * pixels + p[None, :], row[:, None] & inside[None, :]
        h = tl.load(h_in + where, mask=here, other=0.0).to(tl.float32)
        a, slope, _ = _curves(h + tl.load(b + r, mask=row, other=0.0)[:, None], KIND)
        ws = tl.load(w + m[:, None] * rows + r[None, :], mask=write[:, None] & row[None, :], other=0.0)
        total = tl.dot(ws.to(kind), a.to(kind), total, input_precision=HOW)
        if tl.program_id(1) == 0:
            u = tl.load(u_in + where, mask=here, other=0.0).to(tl.float32)
            weight = tl.load(block + r, mask=row, other=0.0)
            of = tl.where((c[:, None] == (r // units)[None, :]) & row[None, :], weight[None, :], 0.0)
            slopes = tl.dot(of.to(kind), (slope * u).to(kind), slopes, input_precision=HOW)
    total += tl.load(w_bias + m, mask=write, other=0.0)[:, None]
    tl.store(value + m[:, None] * pixels + p[None, :], total, mask=write[:, None] & inside[None, :])
    if tl.program_id(1) == 0:
        there = (c < features)[:, None] & inside[None, :]
        tl.store(diagonal + c[:, None] * pixels + p[None, :], slopes, mask=there)


@triton.jit
def _close_backward(
    h_in, u_in, b, w, block, g_value, g_diagonal, g_h, g_u, g_w, g_bias, pixels,
    rows: tl.constexpr, writes: tl.constexpr, units: tl.constexpr,
    KIND: tl.constexpr, HOW: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    kind = h_in.dtype.element_ty
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    program = tl.program_id(1)
    m = tl.arange(0, BM)
    row, write = r < rows, m < writes
    ws = tl.load(w + m[None, :] * rows + r[:, None], mask=row[:, None] & write[None, :], other=0.0).to(kind)
    bias = tl.load(b + r, mask=row, other=0.0)[:, None]
    weight = tl.load(block + r, mask=row, other=0.0)[:, None]
    w_sum = tl.zeros((BR, BM), tl.float32)
    b_sum = tl.zeros((BR,), tl.float32)
    block_sum = tl.zeros((BR,), tl.float32)
    bias_sum = tl.zeros((BM,), tl.float32)
    for tile in range(TILES):
        p = (program * TILES + tile) * BP + tl.arange(0, BP)
        inside = p < pixels
        where, here = r[:, None] * pixels + p[None, :], row[:, None] & inside[None, :]
        h = tl.load(h_in + where, mask=here, other=0.0).to(tl.float32)
        u = tl.load(u_in + where, mask=here, other=0.0).to(tl.float32)
        a, slope, curve = _curves(h + bias, KIND)
        gv = tl.load(g_value + m[:, None] * pixels + p[None, :], mask=write[:, None] & inside[None, :], other=0.0)
        if tl.program_id(0) == 0:
            bias_sum += tl.sum(gv, 1)
        gv = gv.to(kind)
        gd = tl.load(g_diagonal + (r // units)[:, None] * pixels + p[None, :], mask=here, other=0.0)
        ga = tl.dot(ws, gv, input_precision=HOW)
        block_sum += tl.sum(gd * slope * u, 1)
        gd *= weight
        gh = ga * slope + gd * curve * u
        b_sum += tl.sum(gh, 1)
        tl.store(g_h + where, gh.to(kind), mask=here)
        tl.store(g_u + where, (gd * slope).to(kind), mask=here)
        w_sum = tl.dot(a.to(kind), tl.trans(gv), w_sum, input_precision=HOW)
    if tl.program_id(0) == 0:
        tl.store(g_bias + program * writes + m, bias_sum, mask=write)
    to = g_w + (program * rows + r) * (writes + 2)
    tl.store(to[:, None] + m[None, :], w_sum, mask=row[:, None] & write[None, :])
    tl.store(to + writes, b_sum, mask=row)
    tl.store(to + writes + 1, block_sum, mask=row)


def fits(
    x: Tensor, weights: Sequence[Tensor], offsets: Sequence[Tensor], activations: Sequence[Activation], features: int
) -> bool:
    """Whether a network is one that these kernels are for."""
    return (
        len(weights) == 3
        and x.ndim == 2
        and x.dtype == torch.float32
        and all(type(a) in KINDS for a in activations)
        and all(o.shape[-1] == 1 for o in offsets)
        and features <= FEATURES
        and max(len(x), len(weights[-1])) <= WIDEST
        and max(map(len, weights)) * x.shape[1] < 2**31
    )


def _power(n: int) -> int:
    """The smallest size of a tile that holds ``n``."""
    return max(16, triton.next_power_of_2(n))


def _tile(kernel: str, wide: int, like: Tensor) -> tuple[int, int, dict[str, int]]:
    tall, across, warps, stages = next(tile[1:] for tile in TILES[kernel][like.element_size()] if wide <= tile[0])
    return tall, across, {"num_warps": warps, "num_stages": stages}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _how() -> str:
    """Of float32 products; those of bfloat16 are exact before they are added up."""
    # One tf32 product would cut its factors, not round them, and sums of many would all be too small.
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32x3"


def forward(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    delta: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Value, diagonal, and ``a1, delta1, h2, u2``, for contiguous arrays."""
    (reads, pixels), features = x.shape, len(blocks[0])
    first, last = (KINDS[type(a)] for a in activations)
    rows = len(weights[0])
    a, d = (x.new_empty(rows, pixels, dtype=dtype) for _ in range(2))
    tall, wide, options = _tile("open", reads, a)
    _open[(triton.cdiv(pixels, wide), triton.cdiv(rows, tall))](
        x, weights[0], offsets[0], blocks[0], x if delta is None else delta, a, d, pixels, rows,
        reads, rows // features, delta is not None, first, _how(), min(64, _power(reads)), tall, wide, **options,
    )  # fmt: skip
    h = weights[1].to(dtype) @ a
    u = _by_block(blocks[1].to(dtype), d)
    rows, writes = len(h), len(weights[2])
    value, diagonal = x.new_empty(writes, pixels), x.new_empty(features, pixels)
    (tall, wide, options), part = _tile("close", writes, h), min(128, _power(writes))
    _close[(triton.cdiv(pixels, wide), triton.cdiv(writes, part))](
        h, u, offsets[1], weights[2], offsets[2], blocks[2], value, diagonal, pixels, rows, writes, rows // features,
        features, last, _how(), part, _power(features), tall, wide, **options,
    )  # fmt: skip
    return value, diagonal, [a, d, h, u]


def backward(
    g_value: Tensor,
    g_diagonal: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    delta: Tensor | None,
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    """Gradients for ``x``, ``delta``, weights, blocks and offsets from those of value and diagonal."""
    (reads, pixels), features = x.shape, len(blocks[0])
    first, last = (KINDS[type(a)] for a in activations)
    a, d, h, u = kept
    rows, writes = len(h), len(weights[2])
    tall, wide, options = _tile("close_backward", writes, h)
    grid, tiles = _parts(rows, tall, pixels, wide, x)
    g_h, g_u, sums = torch.empty_like(h), torch.empty_like(u), x.new_empty(grid[1], rows, writes + 2)
    b3 = x.new_empty(grid[1], writes, 1)
    _close_backward[grid](
        h, u, offsets[1], weights[2], blocks[2], g_value, g_diagonal, g_h, g_u, sums, b3, pixels, rows, writes,
        rows // features, last, _how(), tiles, _power(writes), tall, wide, **options,
    )  # fmt: skip
    w3, b2, block3 = sums.sum(0).split([writes, 1, 1], 1)
    w2, g_a = g_h @ a.mT, weights[1].to(a.dtype).mT @ g_h
    block2, g_d = _by_block_backward(blocks[1].to(a.dtype), d, g_u)
    rows = len(a)
    tall, wide, options = _tile("open_backward", reads, a)
    grid, tiles = _parts(rows, tall, pixels, wide, x)
    g_x, sums = x.new_empty(grid[0], reads, pixels), x.new_empty(grid[1], rows, reads + 2)
    g_delta = None if delta is None else x.new_empty(grid[0], *delta.shape)
    _open_backward[grid](
        x, weights[0], offsets[0], blocks[0], x if delta is None else delta, g_a, g_d, g_x,
        x if g_delta is None else g_delta, sums, pixels, rows, reads, rows // features, features,
        delta is not None, first, _how(), tiles, _power(reads), _power(features), tall, wide, **options,
    )  # fmt: skip
    w1, b1, block1 = sums.sum(0).split([reads, 1, 1], 1)
    g_blocks = [block1.reshape(blocks[0].shape), block2.float(), block3.reshape(blocks[2].shape)]
    g_offsets = [b1, b2, b3.sum(0)]
    return [g_x.sum(0), None if g_delta is None else g_delta.sum(0), w1, w2.float(), w3.mT, *g_blocks, *g_offsets]


def _parts(rows: int, tall: int, pixels: int, wide: int, x: Tensor) -> tuple[tuple[int, int], int]:
    """The grid of a kernel whose programs go over several tiles of pixels, and how many each."""
    high, across = triton.cdiv(rows, tall), triton.cdiv(pixels, wide)
    tiles = max(1, across * high // (8 * _processors(x.device)))
    return (high, triton.cdiv(across, tiles)), tiles


def _by_block(block: Tensor, d: Tensor) -> Tensor:
    """Diagonal blocks times (rows, pixels); as a whole matrix where they are so small that zeros cost less."""
    features, out, _ = block.shape
    if out < WHOLE_BELOW:
        return _whole(block) @ d
    return torch.bmm(block, d.view(features, -1, d.shape[1])).view(-1, d.shape[1])


def _whole(block: Tensor) -> Tensor:
    """The matrix with these diagonal blocks."""
    features, out, read = block.shape
    grid = block.new_zeros(features, out, features, read)
    grid.diagonal(dim1=0, dim2=2).copy_(block.permute(1, 2, 0))
    return grid.view(features * out, -1)


def _by_block_backward(block: Tensor, d: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `_by_block`."""
    features, out, read = block.shape
    if out < WHOLE_BELOW:
        grid = (g @ d.mT).view(features, out, features, read)
        return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1), _whole(block).mT @ g
    by_block = g.view(features, out, -1)
    g_block = torch.bmm(by_block, d.view(features, read, -1).mT)
    return g_block, torch.bmm(block.mT, by_block).view(d.shape)
