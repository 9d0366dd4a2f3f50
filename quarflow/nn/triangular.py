"""The quasi-autoregressive network: values and the diagonal of their Jacobian, carried side by side.

Inside the network arrays have shape (units, batch) and (features, units per coordinate, batch): the batch is last, so
that the block-diagonal products of the Jacobian diagonal are contiguous batched matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from quarflow.checks import check_choice, check_count, check_layers, check_sigma
from quarflow.kernels import ran, turned_off, usable
from quarflow.kernels import triangular as fast
from quarflow.nn.activations import Activation
from quarflow.nn.activations import activation as make_activation
from quarflow.nn.bounds import BOUNDS, LIPSCHITZ, floor, gram_norm, path_bound, power_norm
from quarflow.nn.masks import WHOLE, Live, Panels, panels, ranks, triangular_mask


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which products of tensors like ``x`` keep their dtype under `torch.autocast`.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x):
    ...     (x @ x).dtype
    torch.float32
    """
    return torch.autocast(x.device.type, enabled=False)


def diagonal_blocks(weight: Tensor, features: int, live: Live = WHOLE) -> Tensor:
    """The diagonal blocks of a (features * out, features * in) matrix, or a part of each: (features, out, in).

    >>> diagonal_blocks(torch.arange(8.0).view(4, 2), 2).flatten(1)
    tensor([[0., 2.],
            [5., 7.]])
    """
    grid = weight.unflatten(0, (features, -1)).unflatten(2, (features, -1))
    return grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)[:, live[0], live[1]]


class TriangularLinear(nn.Module):
    """``h = W a + b + C c`` with a block lower triangular ``W``; its diagonal blocks carry the Jacobian diagonal.

    Group ``i`` of the outputs reads the groups ``<= i`` of the inputs, and the whole context ``c``:

        h_i = sum_{j <= i} W[i,j] a_j + b_i + C_i c,        delta'_i = W[i,i] delta_i

    Shapes: ``a`` (features * in_units, batch), ``delta`` (features, in_units, batch), ``c`` (context, batch).

    >>> layer = TriangularLinear(2, 1, 3)
    >>> weight, blocks = layer.matrices()
    >>> weight.shape, blocks.shape, bool((weight[:3, 1] == 0).all())
    (torch.Size([6, 2]), torch.Size([2, 3, 1]), True)
    """

    mask: Tensor
    live: Live = WHOLE

    def __init__(
        self, features: int, in_units: int, out_units: int, context: int = 0, mask: Tensor | None = None
    ) -> None:
        super().__init__()
        self.features, self.in_units, self.out_units = features, in_units, out_units
        if mask is None:
            mask = triangular_mask(ranks(features, in_units), ranks(features, out_units))
        fan_in = (mask.sum(1, keepdim=True) + context).clamp_min(1)  # a unit may read nothing
        # As numbers: products with booleans convert them first, at every call.
        self.register_buffer("mask", mask.to(torch.get_default_dtype()), persistent=False)
        self.panels = panels(mask)
        self.weight = nn.Parameter(self.mask * torch.randn(mask.shape) / fan_in.sqrt())
        self.bias = nn.Parameter(torch.zeros(len(mask), 1))
        self.context: nn.Parameter | None = None
        if context:
            self.context = nn.Parameter(torch.randn(len(mask), context) / fan_in.sqrt())

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The masked weight (features * out, features * in) and its diagonal blocks (features, out, in)."""
        return self.weight * self.mask, diagonal_blocks(self.weight, self.features, self.live)

    def offset(self, context: Tensor | None) -> Tensor:
        """``b + C c``, shape (features * out, batch) or (features * out, 1)."""
        if self.context is None or context is None:
            return self.bias
        return torch.addmm(self.bias, self.context, context)

    def extra_repr(self) -> str:
        context = "" if self.context is None else f", context={self.context.shape[1]}"
        return f"features={self.features}, units {self.in_units} -> {self.out_units}{context}"


def carry(
    x: Tensor,
    weights: Sequence[Tensor],
    blocks: Sequence[Tensor],
    offsets: Sequence[Tensor],
    activations: Sequence[Activation],
    delta: Tensor | None = None,
    stairs: Sequence[Panels] | None = None,
) -> tuple[Tensor, Tensor]:
    """Values and Jacobian diagonal, layer by layer, as in `TriangularNet`; ``delta`` is that of ``x``, by default 1.

    ``stairs``, for each layer `quarflow.nn.masks.panels` of its mask, say what a faster form need not multiply.

    Shapes: ``x`` (features, batch); for each layer a weight (features * out, features * in), diagonal blocks
    (features, out, in) and an offset (features * out, batch or 1) -> (features, batch), (features, batch). Where
    weights are diagonal blocks alone, they have their shape, and values and offsets (features, units, batch).

    >>> half = torch.full((1, 1), 0.5)
    >>> carry(torch.ones(1, 2), [half], [half[None]], [half], [])
    (tensor([[1., 1.]]), tensor([[0.5000, 0.5000]]))
    """
    features = len(blocks[0])
    value, delta = x, x.new_ones(features, 1, 1) if delta is None else delta
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for weight, block, offset, act in zip(weights, blocks, offsets, [*activations, None], strict=True):
        h = product(offset, weight, value)
        with without_autocast(x):
            # The diagonal keeps the dtype of x under autocast: it is 1/D of the work and all of the log-det.
            delta = block @ delta
            if act is not None:
                value, slope = act(h.view(features, -1, x.shape[-1]))
                delta = delta.repeat(1, act.width, 1) * slope
                value = value.flatten(0, 1) if x.ndim == 2 else value
    return h, delta.squeeze(1).expand(features, x.shape[-1])


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
    """`carry` with the rows of the last layer times ``sigma / (softplus(theta) + B)``, ``B`` the bound of the paths.

    ``shared`` takes the largest ``B`` for all coordinates (``lipschitz="diagonal"``), ``live`` is a part of each
    layer's diagonal blocks. This is the readable reference of `quarflow.kernels.triangular.network`.

    >>> one = torch.ones(1, 1)
    >>> value, diagonal = network(torch.ones(1, 2), [one], [one], [0 * one], None, [], 0.9, False, 1)
    >>> 0.899 < diagonal.max().item() <= 0.9
    True
    """
    with without_autocast(x):
        weights, blocks = scaled(
            weights, masks, theta, [a.width for a in activations], sigma, shared, features, live
        )
    return carry(x, weights, blocks, offsets, activations, delta, stairs)


def scaled(
    weights: Sequence[Tensor],
    masks: Sequence[Tensor],
    theta: Tensor | None,
    widths: Sequence[int],
    sigma: float,
    shared: bool,
    features: int,
    live: Sequence[Live] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of `network` and their diagonal blocks, for activations of these ``widths``.

    >>> one = torch.ones(1, 1)
    >>> scaled([one, one], [one, one], None, [1], 0.5, False, 1)[0]
    [tensor([[1.]]), tensor([[0.5000]])]
    """
    parts = live or [WHOLE] * len(weights)
    blocks = [diagonal_blocks(w, features, part) for w, part in zip(weights, parts, strict=True)]
    weights = [w * m for w, m in zip(weights, masks, strict=True)]
    bound = path_bound(blocks, widths)
    bound = bound.max().expand(features) if shared else bound
    total = (bound if theta is None else bound + softplus(theta)).clamp_min(floor(bound))
    weights[-1], blocks[-1] = scale_rows(weights[-1], blocks[-1], sigma / total)
    return weights, blocks


def scale_rows(weight: Tensor, blocks: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight and its diagonal blocks with each coordinate's rows times its ``scale``, (features,) or one for all.

    >>> scale_rows(torch.ones(2, 1), torch.ones(2, 1, 1), torch.tensor([1.0, 3.0]))[0]
    tensor([[1.],
            [3.]])
    """
    scale = scale.expand(len(blocks))[:, None, None]
    scaled = blocks * scale
    return scaled if weight is blocks else (weight.unflatten(0, (len(blocks), -1)) * scale).flatten(0, 1), scaled


class BoundedNet(nn.Module):
    """What triangular networks share: layers of a block lower triangular matrix each, and the bound of their slopes.

    Args:
        features: number of groups of units.
        layers: of `TriangularLinear`, or of what has its `matrices`; the last with one live row for each group.
        activations: between them.
        opening: activation before the first layer, if there is one.
        lipschitz, sigma, trick, bound: as in `TriangularNet`.

    >>> layers = [TriangularLinear(2, 1, 4), TriangularLinear(2, 4, 1)]
    >>> net = BoundedNet(2, layers, [make_activation("sine")], None, "coordinate", 0.9, True, None)
    >>> [w.shape for w in net.matrices()[0]]
    [torch.Size([8, 2]), torch.Size([2, 8])]
    """

    def __init__(
        self,
        features: int,
        layers: Iterable[nn.Module],
        activations: Iterable[Activation],
        opening: Activation | None,
        lipschitz: str,
        sigma: float,
        trick: bool,
        bound: str | None,
    ) -> None:
        super().__init__()
        check_sigma(sigma)
        check_choice("lipschitz", lipschitz, LIPSCHITZ)
        bound = bound or ("gram" if lipschitz == "network" else "paths")
        check_choice("bound", bound, BOUNDS)
        if bound == "paths" and lipschitz == "network":
            raise ValueError("bound: lipschitz='network' needs spectral norms, 'gram' or 'power'; got 'paths'.")
        self.features = features
        self.lipschitz, self.sigma, self.bound = lipschitz, sigma, bound
        self.opening = opening
        self.activations = nn.ModuleList(activations)
        self.layers = nn.ModuleList(layers)
        self.theta = nn.Parameter(torch.zeros(features)) if trick else None

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """The last weights times ``factor``: with a small one, and the trick, ``F`` is small."""
        self._layers()[-1].weight.mul_(factor)

    def _layers(self) -> list[TriangularLinear]:
        return cast("list[TriangularLinear]", list(self.layers))

    def _activations(self) -> list[Activation]:
        return cast("list[Activation]", list(self.activations))

    def matrices(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and diagonal blocks of every layer, scaled such that the bound holds."""
        pairs = [layer.matrices() for layer in self._layers()]
        weights, blocks = [w for w, _ in pairs], [b for _, b in pairs]
        if self.bound == "paths":
            widths, paths = [a.width for a in self._activations()], blocks
            if self.opening is not None:
                widths, paths = [self.opening.width, *widths], [blocks[0].new_ones(self.features, 1, 1), *blocks]
            norms = [path_bound(paths, widths)]
        else:
            # Power iteration starts from noise: an inverse, without gradients, needs the same F at every step.
            estimate = self.bound == "power" and self.training and torch.is_grad_enabled()
            norm = power_norm if estimate else gram_norm
            norms = [norm(m) for m in (weights if self.lipschitz == "network" else blocks)]
        if self.lipschitz == "diagonal":
            norms = [n.max() for n in norms]
        if self.theta is None and self.bound != "paths":
            # Each layer on its own, to a norm of sigma^(1/L).
            share = self.sigma ** (1 / len(norms))
            scales = [share / n.clamp_min(floor(n)) for n in norms]
            pairs = [scale_rows(w, b, s) for w, b, s in zip(weights, blocks, scales, strict=True)]
            return [w for w, _ in pairs], [b for _, b in pairs]
        theta = 0.0 if self.theta is None else softplus(self.theta)
        total = (theta + prod(norms[1:], start=norms[0])).clamp_min(floor(norms[0]))
        weights[-1], blocks[-1] = scale_rows(weights[-1], blocks[-1], self.sigma / total)
        return weights, blocks

    def _fused(self, x: Tensor) -> bool:
        acts = self._activations() if self.opening is None else [self.opening, *self._activations()]
        fast = usable(x) and all(a.curves is not None for a in acts)
        if not fast:
            ran("layers", "reference", turned_off() or "an activation without written out derivatives")
        return fast

    def _run(
        self, x: Tensor, offsets: Sequence[Tensor], delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values and diagonal of the layers at ``x``, as in `carry`: by the kernel where it may run."""
        layers, activations, fused = self._layers(), self._activations(), self._fused(x)
        stairs = [layer.panels for layer in layers]
        if self.bound == "paths" and x.ndim == 2 and fused:
            weights, masks = [layer.weight for layer in layers], [layer.mask for layer in layers]
            settings = activations, self.sigma, self.lipschitz == "diagonal", self.features
            live = [layer.live for layer in layers]
            return fast.network(x, weights, masks, offsets, self.theta, *settings, delta, live, stairs)
        with without_autocast(x):
            matrices = self.matrices()
        return (fast.carry if fused else carry)(x, *matrices, offsets, activations, delta, stairs)

    def _prepared(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """`_run` without gradients at the weights of now."""
        (weights, blocks), activations = self.matrices(), self._activations()
        stairs = [layer.panels for layer in self._layers()]

        def run(x: Tensor, offsets: Sequence[Tensor], delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return (fast.carry if self._fused(x) else carry)(x, weights, blocks, offsets, activations, delta, stairs)

        return run

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz!r}, sigma={self.sigma}, trick={self.theta is not None}, bound={self.bound!r}"


class TriangularNet(BoundedNet):
    """``x -> (F(x), d(x))`` with ``dF_i/dx_j = 0`` for ``j > i``, ``d_i = dF_i/dx_i`` and ``|d_i| <= sigma``.

        a_0 = x,  h_l = W_l a_{l-1} + b_l + C_l c,  a_l = phi(h_l),  F = W_L a_{L-1} + b_L + C_L c
        delta_0 = 1,  delta_l = phi'(h_l) W_l[i,i] delta_{l-1},  d = W_L[i,i] delta_{L-1}

    The last ``W_L`` (with the trick) or each ``W_l`` (without) is scaled such that the bound of ``lipschitz`` holds
    whatever the weights are: see `quarflow.nn.bounds`. Biases and context are free.

    Shapes: (batch, features) -> (batch, features), (batch, features).

    Args:
        features: number of coordinates D.
        hidden: units per coordinate of each hidden layer.
        context: number of context features, 0 for none.
        activation: name in `quarflow.nn.activations.ACTIVATIONS`.
        lipschitz: "network", "diagonal" or "coordinate".
        sigma: the bound, in [0, 1).
        trick: the paper's Lipschitz Trick, a learnable ``theta >= 0`` for each coordinate.
        bound: "paths", "gram" (both certified) or "power" (the paper's estimate in training, certified in evaluation);
            by default "paths", and "gram" where ``lipschitz="network"``.

    >>> net = TriangularNet(3, hidden=(4,)).double()
    >>> x = torch.randn(3, dtype=torch.float64)
    >>> jacobian = torch.func.jacrev(lambda x: net(x[None])[0][0])(x)
    >>> bool(torch.allclose(jacobian.diagonal(), net(x[None])[1][0]))
    True
    >>> jacobian.triu(1).abs().max().item()
    0.0
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (64, 64),
        context: int = 0,
        activation: str = "wave",
        lipschitz: str = "coordinate",
        sigma: float = 0.97,
        trick: bool = True,
        bound: str | None = None,
    ) -> None:
        check_count("features", features)
        check_count("context", context, least=0)
        check_layers("hidden", hidden, (64, 64))
        activations = [make_activation(activation) for _ in hidden]
        outputs = [units * a.width for units, a in zip(hidden, activations, strict=True)]
        layers = [
            TriangularLinear(features, read, write, context)
            for read, write in zip([1, *outputs], [*hidden, 1], strict=True)
        ]
        super().__init__(features, layers, activations, None, lipschitz, sigma, trick, bound)
        self.context_features = context

    def _offsets(self, context: Tensor | None) -> list[Tensor]:
        c = None if context is None else context.mT
        return [layer.offset(c) for layer in self._layers()]

    @torch.no_grad()
    def prepare(self, context: Tensor | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """`forward` without gradients at one context, for solvers: what does not depend on ``x`` is done once."""
        run, offsets = self._prepared(), self._offsets(context)

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
            value, diagonal = run(x.mT, offsets)
            return value.mT.to(x.dtype), diagonal.mT

        return evaluate

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, diagonal = self._run(x.mT, self._offsets(context))
        return value.mT.to(x.dtype), diagonal.mT
