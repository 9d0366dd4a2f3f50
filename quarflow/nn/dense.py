"""The unmasked network of a residual flow: a contraction that also gives its products with the Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from quarflow.checks import check_choice, check_count, check_layers, check_sigma
from quarflow.nn.activations import Activation
from quarflow.nn.activations import activation as make_activation
from quarflow.nn.bounds import floor, gram_norm, power_norm
from quarflow.nn.triangular import TriangularLinear, without_autocast

NORMS = ("gram", "power")


class ContractiveNet(nn.Module):
    """``x -> (F(x), None)`` with ``||dF/dx||_2 <= sigma``, whatever the weights are.

        a_0 = x,  h_l = W_l a_{l-1} + b_l + C_l c,  a_l = phi(h_l),  F = W_L a_{L-1} + b_L + C_L c

    Biases and context are free. Without the trick a layer with ``||W_l||_2`` above ``sigma^(1/L)`` is brought
    down to it (Behrmann et al. 2019). With it, row ``i`` of the last layer is scaled by
    ``sigma / (theta_i + prod_l ||W_l||_2)``.

    Shapes: (batch, features) -> (batch, features), None.

    Args:
        features: number of coordinates D.
        hidden: units of each hidden layer.
        context: number of context features, 0 for none.
        activation: name in `quarflow.nn.activations.ACTIVATIONS`.
        sigma: the Lipschitz bound, in [0, 1).
        trick: the Lipschitz Trick, a learnable ``theta >= 0`` for each coordinate.
        bound: "gram" (certified), or "power": the published estimate where gradients are taken in training,
            certified elsewhere.

    >>> net = ContractiveNet(3, hidden=(16,), sigma=0.9).double()
    >>> x = torch.randn(3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: net(x[None])[0][0])(x)
    >>> bool(torch.linalg.matrix_norm(jacobian, 2) <= 0.9)
    True
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (128, 128),
        context: int = 0,
        activation: str = "lipswish",
        sigma: float = 0.97,
        trick: bool = False,
        bound: str = "gram",
    ) -> None:
        super().__init__()
        check_count("features", features)
        check_count("context", context, least=0)
        check_layers("hidden", hidden, (128, 128))
        check_sigma(sigma)
        check_choice("bound", bound, NORMS)
        self.features, self.context_features = features, context
        self.sigma, self.bound = sigma, bound
        activations = [make_activation(activation) for _ in hidden]
        outputs = [units * a.width for units, a in zip(hidden, activations, strict=True)]
        # A triangular layer with one group of units: nothing is masked.
        self.layers = nn.ModuleList(
            TriangularLinear(1, read, write, context)
            for read, write in zip([features, *outputs], [*hidden, features], strict=True)
        )
        self.activations = nn.ModuleList(activations)
        self.theta = nn.Parameter(torch.zeros(features)) if trick else None

    def _stack(self) -> list[tuple[TriangularLinear, Activation | None]]:
        return cast(Any, [*zip(self.layers, [*self.activations, None], strict=True)])

    def weights(self) -> list[Tensor]:
        """``W_1 .. W_L``, (out, in) each, scaled such that the product of their norms is at most sigma."""
        weights = [layer.weight for layer, _ in self._stack()]
        # Power iteration starts from noise: the inverse, without gradients, needs the same F at every step.
        estimate = self.bound == "power" and self.training and torch.is_grad_enabled()
        norms = [power_norm(w) if estimate else gram_norm(w) for w in weights]
        if self.theta is None:
            share = self.sigma ** (1 / len(weights))
            return [w * (share / n.clamp_min(max(share, floor(n)))) for w, n in zip(weights, norms, strict=True)]
        total = (softplus(self.theta) + prod(norms[1:], start=norms[0])).clamp_min(floor(norms[0]))
        return [*weights[:-1], weights[-1] * (self.sigma / total)[:, None]]

    def linearise(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``F(x)`` and ``v -> v^T dF/dx``, (batch, features) and (..., batch, features), both differentiable.

        >>> value, pullback = ContractiveNet(2, hidden=(8,)).linearise(torch.zeros(5, 2))
        >>> pullback(value).shape
        torch.Size([5, 2])
        """
        with without_autocast(x):
            weights = self.weights()
        c = None if context is None else context.mT
        h, slopes = x.mT, []
        for weight, (layer, act) in zip(weights, self._stack(), strict=True):
            h = torch.addmm(layer.offset(c), weight, h)
            if act is not None:
                h, slope = act(h)
                slopes.append(slope)

        def pullback(v: Tensor) -> Tensor:
            with without_autocast(v):
                g = weights[-1].mT @ v.movedim(-1, 0).flatten(1)
                for weight, slope in zip(weights[-2::-1], slopes[::-1], strict=True):
                    g = (g.unflatten(1, (-1, slope.shape[1])) * slope[:, None]).flatten(1)
                    if len(g) > len(weight):  # a concatenated activation: back to one value for each unit
                        g = g.unflatten(0, (-1, len(weight))).sum(0)
                    g = weight.mT @ g
                return g.unflatten(1, v.shape[:-1]).movedim(0, -1)

        return h.mT.to(x.dtype), pullback

    @torch.no_grad()
    def prepare(self, context: Tensor | None = None) -> Callable[[Tensor], tuple[Tensor, None]]:
        """`forward` without gradients at one context, for solvers: what does not depend on ``x`` is done once."""
        weights, c = self.weights(), None if context is None else context.mT
        layers = [(weight, layer.offset(c), act) for weight, (layer, act) in zip(weights, self._stack(), strict=True)]

        def evaluate(x: Tensor) -> tuple[Tensor, None]:
            h = x.mT
            for weight, offset, act in layers:
                h = torch.addmm(offset, weight, h)
                h = h if act is None else act(h)[0]
            return h.mT.to(x.dtype), None

        return evaluate

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, None]:
        return self.linearise(x, context)[0], None

    def extra_repr(self) -> str:
        return f"sigma={self.sigma}, trick={self.theta is not None}, bound={self.bound!r}"
