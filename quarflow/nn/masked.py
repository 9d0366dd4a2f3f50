"""Masked networks without a bound on their slopes: conditioners, whose outputs are parameters of a transform.

A unit has a *rank* (`quarflow.nn.masks`): hidden units read ranks up to their own, and outputs lower ranks only. With
ranks ``0 .. D-1`` for inputs and outputs that is MADE; with inputs of rank 0 and outputs of rank 1 nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quarflow.checks import check_choice, check_count, check_layers
from quarflow.nn.masks import triangular_mask

# Any slope will do here, unlike in `quarflow.nn.activations`.
PLAIN_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def soft_clip(x: Tensor, limit: float) -> Tensor:
    """``x / (1 + |x| / limit)``: inside ``(-limit, limit)``, with slope 1 at zero.

    >>> soft_clip(torch.tensor([0.0, 7.0, -1e9]), 7.0)
    tensor([ 0.0000,  3.5000, -7.0000])
    """
    return x / (1 + x.abs() / limit)


class MaskedLinear(nn.Module):
    """``h = (mask * W) a + b + C c``, in the same order as ``torch.nn.Linear``: (batch, in) -> (batch, out).

    >>> layer = MaskedLinear(torch.tensor([[True, False]]))
    >>> torch.func.jacrev(layer)(torch.ones(2))[0, 1].item()
    0.0
    """

    mask: Tensor | None

    def __init__(self, mask: Tensor, context: int = 0, gain: float = 1.0) -> None:
        super().__init__()
        bound = gain * (mask.sum(1, keepdim=True) + context).clamp_min(1).rsqrt()
        numbers = mask.to(torch.get_default_dtype())
        self.register_buffer("mask", None if bool(mask.all()) else numbers, persistent=False)
        self.weight = nn.Parameter(numbers * bound * (2 * torch.rand(mask.shape) - 1))
        self.bias = nn.Parameter(bound[:, 0] * (2 * torch.rand(len(mask)) - 1))
        self.context = nn.Parameter(bound * (2 * torch.rand(len(mask), context) - 1)) if context else None

    def _masked(self) -> Tensor:
        return self.weight if self.mask is None else self.weight * self.mask

    def forward(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        h = linear(a, self._masked(), self.bias)
        return h if self.context is None or context is None else h + linear(context, self.context)

    def columns(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        """`forward` with the batch last: (batch, in) -> (out, batch)."""
        h = torch.addmm(self.bias[:, None], self._masked(), a.mT)
        return h if self.context is None or context is None else torch.addmm(h, self.context, context.mT)

    def extra_repr(self) -> str:
        context = "" if self.context is None else f", context={self.context.shape[1]}"
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}{context}"


class MaskedMLP(nn.Module):
    """``outputs`` numbers for each target, which reads the inputs of lower rank, and the whole context in every layer.

    Shapes: (batch, inputs), (batch, context) -> (batch, targets, outputs).

    Args:
        in_ranks: rank of each input.
        out_ranks: rank of each target.
        outputs: numbers for each target.
        hidden: units of each hidden layer.
        context: number of context features, 0 for none.
        activation: name in `PLAIN_ACTIVATIONS`.

    >>> net = MaskedMLP(torch.tensor([0, 0]), torch.tensor([1, 1, 1]), outputs=2, hidden=(8,))
    >>> net(torch.zeros(5, 2)).shape
    torch.Size([5, 3, 2])
    """

    def __init__(
        self,
        in_ranks: Tensor,
        out_ranks: Tensor,
        outputs: int = 2,
        hidden: Sequence[int] = (64, 64),
        context: int = 0,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_count("outputs", outputs)
        check_count("context", context, least=0)
        check_choice("activation", activation, PLAIN_ACTIVATIONS)
        check_layers("hidden", hidden, (64, 64), least=0)
        self.outputs = outputs
        # Units of the lowest rank serve targets that read no input; they are of use for the context alone.
        highest = int(out_ranks.max()) - 1
        lowest = min(highest, int(out_ranks.min()) - 1 if context else int(in_ranks.min()))
        steps = [highest - torch.arange(units) * (highest - lowest + 1) // units for units in hidden]
        layers = [in_ranks, *steps]
        self.layers = nn.ModuleList(
            MaskedLinear(triangular_mask(read, write), context)
            for read, write in zip(layers[:-1], steps, strict=True)
        )
        last = triangular_mask(layers[-1], out_ranks, strict=True).repeat_interleave(outputs, 0)
        # A small last layer: the transform starts near one without parameters.
        self.layers.append(MaskedLinear(last, context, gain=0.1))
        self.activation = PLAIN_ACTIVATIONS[activation]()

    def _below(self, x: Tensor, context: Tensor | None) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x, context))
        return x

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.layers[-1](self._below(x, context), context).to(x.dtype).unflatten(1, (-1, self.outputs))

    def columns(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """`forward` with the batch last: (batch, inputs) -> (targets, outputs, batch)."""
        last = cast("MaskedLinear", self.layers[-1])
        return last.columns(self._below(x, context), context).to(x.dtype).unflatten(0, (-1, self.outputs))


class MADE(MaskedMLP):
    """The masked autoregressive network (Germain et al. 2015): numbers ``i`` read ``x_<i`` and the context.

    Shapes: (batch, features), (batch, context) -> (batch, features, outputs).

    >>> net = MADE(3, outputs=1, hidden=(8,))
    >>> jacobian = torch.func.jacrev(lambda x: net(x[None])[0, :, 0])(torch.randn(3))
    >>> jacobian.triu().abs().max().item()
    0.0
    """

    def __init__(
        self,
        features: int,
        outputs: int = 2,
        hidden: Sequence[int] = (64, 64),
        context: int = 0,
        activation: str = "relu",
    ) -> None:
        check_count("features", features)
        order = torch.arange(features)
        super().__init__(order, order, outputs, hidden, context, activation)
