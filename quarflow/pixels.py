"""Images of whole numbers: uniform dequantisation, bits per dimension, the rest of an image given its first rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quarflow.checks import check_count, check_tensor
from quarflow.precision import products
from quarflow.solvers import unchecked

if TYPE_CHECKING:
    from quarflow.flow import Flow

LEVELS = 256


def dequantise(x: Tensor, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """``(x + u) / 256`` with ``u`` uniform in [0, 1): uint8 -> [0, 1) with the dtype and device of ``like``.

    The log-density of the result, less ``D log 256``, is a lower bound of the log-probability of ``x``.

    >>> v = dequantise(torch.tensor([[0, 255]], dtype=torch.uint8), torch.zeros(()))
    >>> bool((v >= torch.tensor([0, 255 / 256])).all() and (v < 1).all())
    True
    """
    if x.dtype != torch.uint8:
        raise ValueError(f"x: expected images of dtype torch.uint8, values 0 .. 255; got {x.dtype}.")
    x = x.to(like.device)
    noise = torch.rand(x.shape, dtype=like.dtype, device=like.device, generator=generator)
    # (255 + u) / 256 may round up to 1.
    return ((x + noise) / LEVELS).clamp(max=1 - torch.finfo(like.dtype).eps)


def quantise(v: Tensor) -> Tensor:
    """The nearest images of whole numbers: [0, 1] -> uint8.

    >>> quantise(torch.tensor([0.0, 0.999, 1.0])).tolist()
    [0, 255, 255]
    """
    return (v * LEVELS).floor().clamp(0, LEVELS - 1).to(torch.uint8)


@dataclass(frozen=True)
class BitsPerDim:
    """Mean bits per dimension of ``n`` images over ``draws`` of noise; standard errors over images, and over draws.

    >>> print(BitsPerDim(0.98124, 0.00312, 0.00021, 10000, 3))
    0.9812 ± 0.0031 bits/dim (10000 images, 3 draws of noise: ± 0.0002)
    """

    bpd: float
    standard_error: float
    noise_error: float | None
    n: int
    draws: int

    def __str__(self) -> str:
        noise = "" if self.noise_error is None else f": ± {self.noise_error:.4f}"
        images, draws = f"{self.n} image{'s' * (self.n != 1)}", f"{self.draws} draw{'s' * (self.draws != 1)}"
        return f"{self.bpd:.4f} ± {self.standard_error:.4f} bits/dim ({images}, {draws} of noise{noise})"


@torch.no_grad()
def bits_per_dim(
    flow: Flow,
    x: Tensor,
    context: Tensor | None = None,
    draws: int = 1,
    batch_size: int = 256,
    seed: int = 0,
    precision: str = "full",
) -> BitsPerDim:
    """``8 - log p((x + u) / 256) / (D log 2)`` of uint8 images (n, C, H, W), in batches and ``eval()`` mode.

    An upper bound of ``-log2 P(x) / D``, also where the flow makes noise that knows the image of the uniform ``u``
    (`quarflow.transforms.Dequantisation`).

    ``precision`` is that of the networks' products, see `quarflow.precision`.

    >>> import quarflow as qf
    >>> flow = qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4)
    >>> bits_per_dim(flow, torch.zeros(5, 1, 4, 4, dtype=torch.uint8)).n
    5
    """
    check_images(flow, x)
    check_count("draws", draws)
    check_count("batch_size", batch_size)
    anchor, size = flow.base.anchor, x.shape[1:].numel()
    generator = torch.Generator(anchor.device).manual_seed(seed)
    training = flow.training
    flow.eval()
    try:
        with products(precision, anchor.device):
            found = torch.stack([_bits(flow, x, context, batch_size, generator) for _ in range(draws)])
    finally:
        flow.train(training)
    bits = 8 - found / (size * math.log(2))
    each, per_draw = bits.mean(0), bits.mean(1)
    return BitsPerDim(
        bits.mean().item(),
        each.std().item() / len(x) ** 0.5 if len(x) > 1 else float("nan"),
        per_draw.std().item() / draws**0.5 if draws > 1 else None,
        len(x),
        draws,
    )


def _bits(flow: Flow, x: Tensor, context: Tensor | None, batch: int, generator: torch.Generator) -> Tensor:
    parts = []
    for i in range(0, len(x), batch):
        v = dequantise(x[i : i + batch], flow.base.anchor, generator)
        c = None if context is None else context[i : i + batch]
        parts.append(flow.log_prob(v, c, generator).double())
    return torch.cat(parts)


@torch.no_grad()
def reconstruction_error(flow: Flow, x: Tensor, context: Tensor | None = None) -> float:
    """The largest ``|inverse(forward(v)) - v|`` of dequantised uint8 images, values in [0, 1].

    >>> import quarflow as qf
    >>> flow = qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4)
    >>> reconstruction_error(flow, torch.full((5, 1, 4, 4), 100, dtype=torch.uint8)) < 1e-5
    True
    """
    check_images(flow, x)
    anchor = flow.base.anchor
    v = dequantise(x, anchor, torch.Generator(anchor.device).manual_seed(0))
    c = flow._context_rows(context, v.shape[:1])
    with unchecked():
        back = flow.transform.inverse(flow.transform(v, c)[0], c)[0]
    return (back - v).abs().max().item()


def check_images(flow: Flow, x: object) -> None:
    """``x`` must be uint8 images (n, C, H, W) of the flow's shape.

    >>> import quarflow as qf
    >>> check_images(qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), torch.zeros(5, 3, 4, 4))
    Traceback (most recent call last):
    ValueError: x: expected uint8 images (n, 1, 4, 4), those of the flow; got torch.float32 of shape (5, 3, 4, 4). ...
    """
    shape = tuple(flow.event_shape)
    if len(shape) != 3:
        raise ValueError(f"flow: expected one of images; this one is of vectors of {shape[0]} features.")
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a tensor of uint8 images; got {type(x).__name__}. Use torch.from_numpy(x).")
    if x.dtype != torch.uint8 or x.ndim != 4 or tuple(x.shape[1:]) != shape or not len(x):
        raise ValueError(
            f"x: expected uint8 images (n, {', '.join(map(str, shape))}), those of the flow; got {x.dtype} of shape "
            f"{tuple(x.shape)}. Resize or convert the images, or train a model for them."
        )


@torch.no_grad()
def complete(
    flow: Flow,
    x: Tensor,
    rows: int | None = None,
    context: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws of the rest of each image given its first ``rows``: floats in [0, 1] (n, C, H, W) -> likewise.

    ``rows`` is by default half of them. They come back as they are.

    The draws are exact: where all blocks go through the pixels in one raster order, the first rows of ``x`` are the
    image of the first part of ``z`` alone. That part is kept, and the rest drawn. It takes ``order="pixel"``,
    ``mixing=None`` and no dense blocks, and ``rows`` that no squeeze divides.

    >>> import quarflow as qf
    >>> flow = qf.models.quar_image((1, 4, 4), blocks=(1, 1), hidden=4, mixing=None)
    >>> x = torch.rand(2, 1, 4, 4)
    >>> torch.equal(complete(flow, x, rows=2)[:, :, :2], x[:, :, :2])
    True
    """
    config = flow.config
    options = {} if config is None else config.to_dict()
    wrong = [
        f"{name}={options.get(name)!r}"
        for name, right in {"order": "pixel", "mixing": None, "dense_blocks": 0}.items()
        if options.get(name, "?") != right
    ]
    if wrong:
        raise ValueError(
            f"flow: expected a quar_image with order='pixel', mixing=None and dense_blocks=0, whose blocks share one "
            f"order; got {', '.join(wrong)}."
        )
    check_tensor("x", x, tuple(flow.event_shape), flow.base.anchor)
    step = 2 ** (len(options["blocks"]) - 1)
    height = x.shape[-2]
    rows = max(1, height // 2 // step) * step if rows is None else rows
    if not isinstance(rows, int) or not 0 < rows < height or rows % step:
        raise ValueError(f"rows: expected a multiple of {step} from {step} to {height - step}; got {rows!r}.")
    given = torch.zeros(1, *x.shape[1:], dtype=torch.bool, device=x.device)
    given[:, :, :rows] = True
    # The rows below only have to be in the domain of the logit.
    x = torch.where(given, x, 0.5 * torch.ones_like(x))
    drawn = flow._complete(x, given, flow._context_rows(context, x.shape[:1]), generator)
    return torch.where(given, x, drawn)
