"""Ready models: one function and one frozen configuration for each.

>>> import quarflow as qf
>>> flow = qf.models.quar(features=3, blocks=2, hidden=(8, 8))
>>> flow.config.to_dict()["model"], flow.exact
('quar', True)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from quarflow.bases import BASES, base
from quarflow.checks import check_choice, check_count, check_positive
from quarflow.flow import Flow
from quarflow.logdet import FullLogDet, RouletteLogDet, SeriesLogDet
from quarflow.nn.conditioned import ConditionedNet
from quarflow.nn.conditioners import AttentionConditioner, ConvConditioner, PixelFeatures
from quarflow.nn.convolution import ContractiveConvNet, TriangularConvNet
from quarflow.nn.dense import ContractiveNet
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import SOLVERS
from quarflow.transforms.autoregressive import MaskedAffine
from quarflow.transforms.base import Chain, Inverse, Transform
from quarflow.transforms.bnaf import BNAF
from quarflow.transforms.coupling import AdditiveCoupling, AffineCoupling, LearnedPrior, MixtureCoupling
from quarflow.transforms.dequantisation import Dequantisation
from quarflow.transforms.elementwise import ActNorm, Affine, Logit, Standardise
from quarflow.transforms.mixing import LULinear, Permutation, Reverse
from quarflow.transforms.planar import Planar, Radial, Sylvester
from quarflow.transforms.reshape import MultiScale, Reshape, Squeeze
from quarflow.transforms.residual import ConditionedResidual, Residual

if TYPE_CHECKING:
    from quarflow.table_flow import TableFlow
    from quarflow.tables import Schema

MIXINGS = ("reverse", "lu", "permute", None)
BLOCKS = ("plain", "conditioned")
REGISTRY: dict[str, type[ModelConfig]] = {}


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of: what `quarflow.save` writes beside the weights.

    A subclass is a frozen dataclass with a ``name`` and `assemble`; it enters `REGISTRY` by itself.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.name] = cls

    def assemble(self) -> Flow:
        """The flow of this configuration, with fresh weights."""
        raise NotImplementedError(f"{type(self).__name__} must define assemble() -> Flow.")

    def build(self) -> Flow:
        """`assemble`, with the configuration attached."""
        flow = self.assemble()
        flow.config = self
        return flow

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: ``{"model": name, **fields}``."""
        return {"model": self.name, **dataclasses.asdict(self)}


def from_dict(options: dict[str, Any]) -> ModelConfig:
    """The configuration that ``to_dict`` gave.

    >>> from_dict({"model": "quar", "features": 2}).features
    2
    """
    if not isinstance(options, dict) or "model" not in options:
        raise ValueError(f"configuration: expected a dictionary with a 'model'; got {options!r}.")
    options = dict(options)
    kind = options.pop("model")
    check_choice("model", kind, REGISTRY)
    known = {f.name for f in dataclasses.fields(REGISTRY[kind])}
    if unknown := set(options) - known:
        raise ValueError(
            f"configuration: model {kind!r} has no option {', '.join(map(repr, sorted(unknown)))}; "
            f"it has {', '.join(sorted(known))}."
        )
    try:
        return REGISTRY[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    except TypeError as error:  # a required option is missing
        raise ValueError(f"configuration: {error}.") from None


def _mixing(name: str | None, features: int) -> list[Transform]:
    make: dict[str | None, Callable[[], list[Transform]]] = {
        "reverse": lambda: [Reverse()],
        "lu": lambda: [LULinear(features)],
        "permute": lambda: [Permutation(torch.randperm(features))],
        None: list,
    }
    return make[name]()


@dataclass(frozen=True)
class QuarConfig(ModelConfig):
    """Options of `quar`."""

    name: ClassVar[str] = "quar"

    features: int
    context: int = 0
    block: str = "plain"  # or "conditioned": a network for each coordinate, which hears of those before
    blocks: int = 8
    hidden: tuple[int, ...] | None = None  # units per coordinate and layer; None: (64, 64), conditioned (16, 16)
    conditioner: tuple[int, ...] = (64, 64)  # of conditioned blocks: units of each layer that reads those before
    activation: str = "wave"  # its slope fills [-1, 1]; the paper: "elu"
    lipschitz: str = "coordinate"  # the tightest; the paper: "network"
    sigma: float = 0.97
    trick: bool = True
    bound: str | None = None  # "paths", or "gram" with lipschitz="network"
    mixing: str | None = "reverse"
    actnorm: bool = True  # a learnable scale and shift before every block
    base: str = "normal"
    solver: str = "newton"
    start: float = 1.0  # size of every block's last weights before training: with 0.01 it is nearly an identity

    def __post_init__(self) -> None:
        check_choice("block", self.block, BLOCKS)
        if self.hidden is None:
            object.__setattr__(self, "hidden", (64, 64) if self.block == "plain" else (16, 16))
        for name in ("hidden", "conditioner"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_count("features", self.features)
        check_count("context", self.context, least=0)
        check_count("blocks", self.blocks)
        check_choice("mixing", self.mixing, MIXINGS)
        check_choice("base", self.base, BASES)
        check_choice("solver", self.solver, SOLVERS)
        check_positive("start", self.start)
        if self.start != 1 and not self.trick:
            raise ValueError(f"start: expected 1 without the trick, which sets the size; got {self.start!r}.")

    def step(self) -> Transform:
        """One block, with fresh weights."""
        hidden = cast("tuple[int, ...]", self.hidden)
        bounds = self.activation, self.lipschitz, self.sigma, self.trick, self.bound
        solver = SOLVERS[self.solver]()
        if self.block == "conditioned":
            conditioned = ConditionedNet(self.features, hidden, self.conditioner, self.context, *bounds)
            conditioned.shrink(self.start)
            return ConditionedResidual(conditioned, solver)
        net = TriangularNet(self.features, hidden, self.context, *bounds)
        net.shrink(self.start)
        return Residual(net, solver=solver)

    def assemble(self) -> Flow:
        d = self.features
        steps: list[Transform] = [Standardise(d)]
        for i in range(self.blocks):
            steps += [ActNorm(d, self.context)] if self.actnorm else []
            steps += [self.step()]
            # No mixing behind the last block: the base does not see an order.
            steps += _mixing(self.mixing, d) if i < self.blocks - 1 else []
        steps += [Affine(d, self.context)]
        return Flow(Chain(steps), base(self.base, (d,)), self.context)


def quar(features: int, context: int = 0, **options: Any) -> Flow:
    """A quasi-autoregressive residual flow for vectors (Gopal 2020): ``blocks`` times ``z = x + F(x)``.

    ``F`` is a `quarflow.nn.triangular.TriangularNet`, so ``log_prob`` is exact:
    ``log|det| = sum_i log(1 + dF_i/dx_i)``. With ``block="conditioned"`` a block is
    ``z_i = exp(a_i) (x_i + F_i(x_i; h_i)) + t_i``, whose ``a_i, t_i, h_i`` read ``x_<i``: a `ConditionedResidual`.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none.
        **options: the fields of `QuarConfig`: ``block``, ``blocks``, ``hidden`` (units per coordinate and layer),
            ``conditioner`` (units of the layers that read ``x_<i``), ``activation``, ``lipschitz``, ``sigma``,
            ``trick``, ``bound``, ``mixing``, ``actnorm``, ``base``, ``solver``, ``start``.

    >>> quar(features=2, blocks=1, hidden=(4,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(QuarConfig, features=features, context=context, **options).build()


def _config(kind: type[ModelConfig], **options: Any) -> ModelConfig:
    return from_dict({"model": kind.name, **options})


@dataclass(frozen=True)
class _Stack:
    """What the models below share: ``blocks`` times actnorm, one `step`, mixing."""

    features: int
    context: int = 0
    blocks: int = 8
    mixing: str | None = "reverse"
    actnorm: bool = True  # a learnable scale and shift before every step
    base: str = "normal"

    def __post_init__(self) -> None:
        if isinstance(hidden := getattr(self, "hidden", None), list):
            object.__setattr__(self, "hidden", tuple(hidden))
        check_count("features", self.features)
        check_count("context", self.context, least=0)
        check_count("blocks", self.blocks)
        check_choice("mixing", self.mixing, MIXINGS)
        check_choice("base", self.base, BASES)

    def step(self) -> Transform:
        """One step of the flow, with fresh weights."""
        raise NotImplementedError(f"{type(self).__name__} must define step() -> Transform.")

    def assemble(self) -> Flow:
        d = self.features
        steps: list[Transform] = [Standardise(d)]
        for i in range(self.blocks):
            steps += [ActNorm(d, self.context)] if self.actnorm else []
            steps += [self.step()]
            steps += _mixing(self.mixing, d) if i < self.blocks - 1 else []
        steps += [Affine(d, self.context)]
        return Flow(Chain(steps), base(self.base, (d,)), self.context)


@dataclass(frozen=True)
class _Conditioned(_Stack):
    hidden: tuple[int, ...] = (64, 64)  # units of each layer of the conditioner
    activation: str = "relu"


@dataclass(frozen=True)
class MAFConfig(_Conditioned, ModelConfig):
    """Options of `maf`."""

    name: ClassVar[str] = "maf"

    def step(self) -> Transform:
        return MaskedAffine(self.features, self.context, self.hidden, self.activation)


def maf(features: int, context: int = 0, **options: Any) -> Flow:
    """A masked autoregressive flow (Papamakarios et al. 2017): ``blocks`` times `MaskedAffine`.

    ``log_prob`` takes one pass of each network, a draw one for each coordinate.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none.
        **options: the fields of `MAFConfig`: ``blocks``, ``hidden`` (units of each layer), ``activation``, ``mixing``,
            ``actnorm``, ``base``.

    >>> maf(features=2, blocks=1, hidden=(8,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(MAFConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class IAFConfig(_Conditioned, ModelConfig):
    """Options of `iaf`."""

    name: ClassVar[str] = "iaf"

    def step(self) -> Transform:
        return Inverse(MaskedAffine(self.features, self.context, self.hidden, self.activation))


def iaf(features: int, context: int = 0, **options: Any) -> Flow:
    """An inverse autoregressive flow (Kingma et al. 2016): ``blocks`` times the inverse of `MaskedAffine`.

    A draw takes one pass of each network, ``log_prob`` one for each coordinate.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none.
        **options: the fields of `IAFConfig`: ``blocks``, ``hidden`` (units of each layer), ``activation``, ``mixing``,
            ``actnorm``, ``base``.

    >>> iaf(features=2, blocks=1, hidden=(8,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(IAFConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class NICEConfig(_Conditioned, ModelConfig):
    """Options of `nice`."""

    name: ClassVar[str] = "nice"

    def step(self) -> Transform:
        return AdditiveCoupling(self.features, self.context, self.hidden, self.activation)


def nice(features: int, context: int = 0, **options: Any) -> Flow:
    """Non-linear independent components estimation (NICE, Dinh et al. 2014): ``blocks`` additive couplings.

    With ``actnorm=False`` only the scale behind the last coupling changes volume, as published.

    Args:
        features: number of coordinates, at least 2.
        context: number of conditioning features, 0 for none.
        **options: the fields of `NICEConfig`: ``blocks``, ``hidden`` (units of each layer), ``activation``, ``mixing``,
            ``actnorm``, ``base``.

    >>> nice(features=2, blocks=1, hidden=(8,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(NICEConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class RealNVPConfig(_Conditioned, ModelConfig):
    """Options of `realnvp`."""

    name: ClassVar[str] = "realnvp"

    def step(self) -> Transform:
        return AffineCoupling(self.features, self.context, self.hidden, self.activation)


def realnvp(features: int, context: int = 0, **options: Any) -> Flow:
    """RealNVP (Dinh et al. 2016): ``blocks`` affine couplings. Densities and draws take one pass of each network.

    Args:
        features: number of coordinates, at least 2.
        context: number of conditioning features, 0 for none.
        **options: the fields of `RealNVPConfig`: ``blocks``, ``hidden`` (units of each layer), ``activation``,
            ``mixing``, ``actnorm``, ``base``.

    >>> realnvp(features=2, blocks=1, hidden=(8,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(RealNVPConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class PlanarConfig(_Stack, ModelConfig):
    """Options of `planar`."""

    name: ClassVar[str] = "planar"

    blocks: int = 32  # each bends space along one direction only
    mixing: str | None = None

    def step(self) -> Transform:
        return Planar(self.features, self.context)


def planar(features: int, context: int = 0, **options: Any) -> Flow:
    """A planar flow (Rezende & Mohamed 2015): ``blocks`` times ``z = x + u tanh(w.x + b)``.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none; ``u``, ``w`` and ``b`` are affine in it.
        **options: the fields of `PlanarConfig`: ``blocks``, ``mixing``, ``actnorm``, ``base``.

    >>> planar(features=2, blocks=1).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(PlanarConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class RadialConfig(_Stack, ModelConfig):
    """Options of `radial`."""

    name: ClassVar[str] = "radial"

    blocks: int = 32  # each moves points towards one centre or away from it
    mixing: str | None = None

    def step(self) -> Transform:
        return Radial(self.features, self.context)


def radial(features: int, context: int = 0, **options: Any) -> Flow:
    """A radial flow (Rezende & Mohamed 2015): ``blocks`` times ``z = x + beta (x - x0) / (alpha + |x - x0|)``.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none; ``x0``, ``log alpha`` and what ``beta`` comes from are
            affine in it.
        **options: the fields of `RadialConfig`: ``blocks``, ``mixing``, ``actnorm``, ``base``.

    >>> radial(features=2, blocks=1).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(RadialConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class SylvesterConfig(_Stack, ModelConfig):
    """Options of `sylvester`."""

    name: ClassVar[str] = "sylvester"

    blocks: int = 16
    mixing: str | None = None
    rank: int | None = None  # directions that a step bends; None: all features, at most 16

    def step(self) -> Transform:
        return Sylvester(self.features, self.context, self.rank)


def sylvester(features: int, context: int = 0, **options: Any) -> Flow:
    """A Sylvester flow (van den Berg et al. 2018): ``blocks`` times ``z = x + Q R tanh(S Q^T x + b)``.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none; every parameter of a step is affine in it.
        **options: the fields of `SylvesterConfig`: ``blocks``, ``rank``, ``mixing``, ``actnorm``, ``base``.

    >>> sylvester(features=2, blocks=1).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(SylvesterConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class BNAFConfig(_Stack, ModelConfig):
    """Options of `bnaf`."""

    name: ClassVar[str] = "bnaf"

    blocks: int = 4
    hidden: tuple[int, ...] = (16, 16)  # units per coordinate and layer

    def step(self) -> Transform:
        return BNAF(self.features, self.context, self.hidden)


def bnaf(features: int, context: int = 0, **options: Any) -> Flow:
    """A block neural autoregressive flow (De Cao et al. 2019): ``blocks`` times a gated network with positive slopes.

    Draws are by numbers, coordinate after coordinate, to a tolerance. Unlike the published one, the last block has its
    gate too: without it the flow would be onto a box, and most draws of the base would have no inverse.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none.
        **options: the fields of `BNAFConfig`: ``blocks``, ``hidden`` (units per coordinate and layer), ``mixing``,
            ``actnorm``, ``base``.

    >>> bnaf(features=2, blocks=1, hidden=(4,)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """
    return _config(BNAFConfig, features=features, context=context, **options).build()


@dataclass(frozen=True)
class TableConfig(ModelConfig):
    """Options of `table`."""

    name: ClassVar[str] = "table"

    schema: str  # the text of `quarflow.tables.Schema.to_json`
    flow: dict[str, Any]  # the configuration of the flow of the numbers, with no features and context
    label_hidden: int = 32  # units of the networks of the categories
    points: int = 8  # at which the density is taken in a cell of whole numbers
    knots: int = 0  # of the quantiles that make each column normal before the flow
    missing: str = "error"  # or "marginal": rows may lack the last columns of the order

    def assemble(self) -> Flow:
        from quarflow.table_flow import TableFlow
        from quarflow.tables import Schema

        schema = Schema.from_json(self.schema)
        known = schema.context_features + sum(len(c.values) for c in schema.labels)
        inner = Flow(Chain([]), base("normal", (0,)), known)  # of a table without numbers
        if schema.numbers:
            inner = from_dict({**self.flow, "features": len(schema.numbers), "context": known}).build()
        return TableFlow(schema, inner, self.label_hidden, self.points, self.knots, self.missing)


def table(
    schema: Schema,
    model: str = "quar",
    label_hidden: int = 32,
    points: int = 8,
    knots: int = 0,
    missing: str = "error",
    **options: Any,
) -> TableFlow:
    """A flow of the rows of a table: numbers, whole numbers, categories and context; see `quarflow.tables`.

    Args:
        schema: what the columns are.
        model: the flow of the numbers.
        label_hidden: units of the networks of the categories.
        points: at which the density is taken in a cell of whole numbers.
        knots: of `quarflow.transforms.Quantiles`, which make each column normal before the flow; 0 for none.
        missing: ``"marginal"`` if rows may lack values, the last ones in the order of the model, which are integrated
            out: with ``mixing=None`` alone.
        **options: those of the model.

    >>> from quarflow.tables import Schema, as_table
    >>> rows = as_table({"size": [1.5, 2.25, 4.0, 2.5], "colour": ["red", "blue", "red", "red"]})
    >>> table(Schema.of(rows), blocks=1, hidden=(4,)).event_shape
    torch.Size([2])
    """
    flow = TableConfig(schema.to_json(), {"model": model, **options}, label_hidden, points, knots, missing).build()
    return cast("TableFlow", flow)


LOGDETS = ("roulette", "full", "series")


@dataclass(frozen=True)
class ResidualConfig(_Stack, ModelConfig):
    """Options of `residual`."""

    name: ClassVar[str] = "residual"

    mixing: str | None = None  # the networks mix the coordinates
    hidden: tuple[int, ...] = (128, 128)  # units of each layer
    activation: str = "lipswish"
    sigma: float = 0.97
    trick: bool = False
    bound: str = "gram"  # certified; published: "power"
    logdet: str = "roulette"
    exact_terms: int = 2  # of the roulette in training, and `rate` more on average
    distribution: str = "poisson"
    rate: float = 2.0
    eval_exact_terms: int = 20
    gradient: str = "neumann"
    memory_saving: bool = False  # less memory, more time: for wide networks
    terms: int = 10  # of the truncated series
    solver: str = "banach"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("logdet", self.logdet, LOGDETS)
        check_choice("solver", self.solver, ("banach",))  # Newton needs a triangular Jacobian

    def step(self) -> Transform:
        net = ContractiveNet(
            self.features, self.hidden, self.context, self.activation, self.sigma, self.trick, self.bound
        )
        logdet: torch.nn.Module = FullLogDet()
        if self.logdet == "series":
            logdet = SeriesLogDet(self.terms)
        elif self.logdet == "roulette":
            logdet = RouletteLogDet(
                self.exact_terms,
                self.distribution,
                self.rate,
                self.gradient,
                self.memory_saving,
                self.eval_exact_terms,
            )
        return Residual(net, logdet, SOLVERS[self.solver]())


def residual(features: int, context: int = 0, **options: Any) -> Flow:
    """A residual flow (Chen et al. 2019): ``blocks`` times ``z = x + F(x)``, ``F`` a contraction.

    Its Jacobians are not triangular: ``log_prob`` is an unbiased estimate (``logdet="roulette"``), exact at the
    price of D products (``"full"``), or truncated and biased (``"series"``); see `quarflow.logdet`.

    Args:
        features: number of coordinates.
        context: number of conditioning features, 0 for none.
        **options: the fields of `ResidualConfig`: ``blocks``, ``hidden`` (units of each layer), ``activation``,
            ``sigma``, ``trick``, ``bound``, ``logdet``, ``exact_terms``, ``distribution``, ``rate``,
            ``eval_exact_terms``, ``gradient``, ``memory_saving``, ``terms``, ``mixing``, ``actnorm``, ``base``,
            ``solver``.

    >>> flow = residual(features=2, blocks=1, hidden=(8,))
    >>> flow.exact, residual(features=2, blocks=1, hidden=(8,), logdet="full").exact
    (False, True)
    """
    return _config(ResidualConfig, features=features, context=context, **options).build()


def _scales(
    shape: tuple[int, int, int], blocks: tuple[int, ...], halve: bool, squeeze_first: bool = False
) -> list[tuple[int, int, int]]:
    """The shape of the image at each scale: a squeeze between two, which may finish half of the channels."""
    shapes = [shape]
    for i in range(len(blocks) if squeeze_first else len(blocks) - 1):
        channels, height, width = shapes[-1]
        if height % 2 or width % 2:
            most = len(shapes) - squeeze_first
            raise ValueError(
                f"blocks: expected at most {most} scales for images of {shape}, whose height and width have to "
                f"be even at each squeeze; got {len(blocks)}: {blocks}."
            )
        shapes.append((4 * channels // (2 if halve and not (squeeze_first and i == 0) else 1), height // 2, width // 2))
    return shapes[squeeze_first:]


@dataclass(frozen=True)
class _Image:
    """What all image models share: floats in [0, 1] through a logit, blocks at several scales."""

    shape: tuple[int, int, int]  # channels, height, width
    context: int = 0
    blocks: tuple[int, ...] = (16, 16, 16)  # at each scale; a squeeze between two
    hidden: int = 512  # units of a hidden layer
    alpha: float | None = None  # of the logit; None: 1e-6 for one channel, 0.05 for more, as published
    base: str = "normal"

    def __post_init__(self) -> None:
        for name in ("shape", "blocks"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
            if not isinstance(value, tuple | list) or not value:
                raise ValueError(f"{name}: expected a tuple of integers; got {value!r}.")
            for n in value:
                check_count(name, n)
        if len(self.shape) != 3:
            raise ValueError(f"shape: expected (channels, height, width); got {self.shape}.")
        check_count("context", self.context, least=0)
        check_count("hidden", self.hidden)
        check_choice("base", self.base, BASES)

    def flow(self, body: list[Transform], head: Sequence[Transform] = ()) -> Flow:
        """``head`` for values in [0, 1], the logit, ``body``, and the base."""
        alpha = (1e-6 if self.shape[0] == 1 else 0.05) if self.alpha is None else self.alpha
        return Flow(Chain([*head, Logit(alpha), *body]), base(self.base, self.shape), self.context)


@dataclass(frozen=True)
class _ImageStack(_Image):
    """What models of residual blocks share: at each scale actnorm and ``blocks`` times a block and actnorm."""

    activation: str = "elu"
    sigma: float = 0.97
    trick: bool = True
    mixing: str | None = "reverse"
    factor_out: bool = False  # half of the channels are finished at each squeeze
    dense_blocks: int = 0  # fully connected blocks behind the last scale
    dense_hidden: tuple[int, ...] = (1,)  # units of their layers

    def __post_init__(self) -> None:
        super().__post_init__()
        hidden = self.dense_hidden
        object.__setattr__(self, "dense_hidden", tuple(hidden) if isinstance(hidden, list) else hidden)
        check_count("dense_blocks", self.dense_blocks, least=0)
        check_choice("mixing", self.mixing, ("reverse", None))
        _scales(self.shape, self.blocks, self.factor_out)

    def block(self, shape: tuple[int, int, int], opening: bool) -> Transform:
        """One block for images of ``shape``, with fresh weights; the first of a flow has no ``opening`` activation."""
        raise NotImplementedError(f"{type(self).__name__} must define block(shape, opening) -> Transform.")

    def dense_block(self, size: int) -> Transform:
        """One block for all ``size`` values of an image."""
        raise NotImplementedError(f"{type(self).__name__} must define dense_block(size) -> Transform.")

    def last(self, shape: tuple[int, int, int]) -> list[Transform]:
        """What comes behind the last scale."""
        size = torch.Size(shape).numel()
        steps: list[Transform] = []
        for _ in range(self.dense_blocks):
            steps += [*([Reverse()] if self.mixing else []), self.dense_block(size), ActNorm(size, self.context)]
        return [Reshape(shape, (size,)), *steps, Reshape((size,), shape)] if steps else []

    def assemble(self) -> Flow:
        shapes, scales = _scales(self.shape, self.blocks, self.factor_out), []
        for i, (shape, count) in enumerate(zip(shapes, self.blocks, strict=True)):
            steps: list[Transform] = [ActNorm((shape[0], 1, 1), self.context)]
            for j in range(count):
                steps += [self.block(shape, opening=i + j > 0), ActNorm((shape[0], 1, 1), self.context)]
                steps += [Reverse()] if self.mixing and j < count - 1 else []
            scales.append([*steps, *([Squeeze()] if i < len(shapes) - 1 else self.last(shape))])
        if self.factor_out:
            return self.flow([MultiScale([Chain(scale) for scale in scales])])
        body = [step for scale in scales for step in scale]
        return self.flow(body + ([Reshape(shapes[-1], self.shape)] if len(shapes) > 1 else []))


@dataclass(frozen=True)
class QuarImageConfig(_ImageStack, ModelConfig):
    """Options of `quar_image`."""

    name: ClassVar[str] = "quar_image"

    order: str = "pixel"  # of the coordinates: "pixel", raster order (the paper's), or "channel"
    lipschitz: str = "coordinate"  # a bound for each channel; the paper: "diagonal", the largest for all
    bound: str | None = None
    dense_hidden: tuple[int, ...] = (1,)  # units for each value of the image
    solver: str = "newton"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("solver", self.solver, SOLVERS)

    def block(self, shape: tuple[int, int, int], opening: bool) -> Transform:
        net = TriangularConvNet(
            shape[0],
            self.hidden,
            self.context,
            self.activation,
            self.order,
            opening,
            self.lipschitz,
            self.sigma,
            self.trick,
            self.bound,
        )
        return Residual(net, solver=SOLVERS[self.solver]())

    def dense_block(self, size: int) -> Transform:
        net = TriangularNet(
            size,
            self.dense_hidden,
            self.context,
            self.activation,
            self.lipschitz,
            self.sigma,
            self.trick,
            self.bound,
        )
        return Residual(net, solver=SOLVERS[self.solver]())


def quar_image(shape: tuple[int, int, int], context: int = 0, **options: Any) -> Flow:
    """A convolutional quasi-autoregressive residual flow (Gopal 2020) for images in [0, 1], (batch, C, H, W).

    A block is `quarflow.nn.convolution.TriangularConvNet`, so ``log_prob`` is exact. Data of whole numbers 0 .. 255 get
    uniform noise first: `quarflow.pixels.dequantise`; `quarflow.fit` and `quarflow.bits_per_dim` do so themselves.

    Args:
        shape: (channels, height, width).
        context: number of conditioning features, 0 for none.
        **options: the fields of `QuarImageConfig`: ``blocks`` (at each scale), ``hidden`` (a multiple of the channels
            at every scale), ``activation``, ``order``, ``lipschitz``, ``sigma``, ``trick``, ``bound``, ``mixing``,
            ``factor_out``, ``dense_blocks``, ``dense_hidden``, ``alpha``, ``base``, ``solver``.

    >>> flow = quar_image((1, 4, 4), blocks=(1, 1), hidden=8)
    >>> flow.log_prob(torch.rand(3, 1, 4, 4)).shape, flow.exact
    (torch.Size([3]), True)
    """
    return _config(QuarImageConfig, shape=shape, context=context, **options).build()


@dataclass(frozen=True)
class ResidualImageConfig(_ImageStack, ModelConfig):
    """Options of `residual_image`; by default the published ones, without the fully connected blocks."""

    name: ClassVar[str] = "residual_image"

    activation: str = "lipswish"
    sigma: float = 0.98**3  # 0.98 for each layer
    trick: bool = False
    mixing: str | None = None
    dense_hidden: tuple[int, ...] = (128, 128)
    logdet: str = "roulette"
    exact_terms: int = 2  # of the roulette in training, and `rate` more on average
    distribution: str = "poisson"
    rate: float = 2.0
    eval_exact_terms: int = 20
    memory_saving: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("logdet", self.logdet, ("roulette", "full"))

    def block(self, shape: tuple[int, int, int], opening: bool) -> Transform:
        net = ContractiveConvNet(
            shape[0],
            shape[1:],
            self.hidden,
            self.context,
            self.activation,
            opening,
            self.sigma,
            self.trick,
        )
        return self.residual(net)

    def dense_block(self, size: int) -> Transform:
        return self.residual(
            ContractiveNet(size, self.dense_hidden, self.context, self.activation, self.sigma, self.trick)
        )

    def residual(self, net: ContractiveConvNet | ContractiveNet) -> Transform:
        """The block of a network."""
        logdet: torch.nn.Module = FullLogDet()
        if self.logdet == "roulette":
            logdet = RouletteLogDet(
                self.exact_terms,
                self.distribution,
                self.rate,
                memory_saving=self.memory_saving,
                eval_exact_terms=self.eval_exact_terms,
            )
        return Residual(net, logdet, SOLVERS["banach"]())


def residual_image(shape: tuple[int, int, int], context: int = 0, **options: Any) -> Flow:
    """A convolutional residual flow (Chen et al. 2019) for images in [0, 1], (batch, C, H, W).

    A block is `quarflow.nn.convolution.ContractiveConvNet`; ``log_prob`` is an unbiased estimate, or exact with
    ``logdet="full"``, for images of few pixels.

    Args:
        shape: (channels, height, width).
        context: number of conditioning features, 0 for none.
        **options: the fields of `ResidualImageConfig`: ``blocks``, ``hidden``, ``activation``, ``sigma``, ``trick``,
            ``mixing``, ``factor_out``, ``dense_blocks`` (published: 4), ``dense_hidden``, ``alpha``, ``base``,
            ``logdet``, ``exact_terms``, ``distribution``, ``rate``, ``eval_exact_terms``, ``memory_saving``.

    >>> residual_image((1, 4, 4), blocks=(1, 1), hidden=8).log_prob(torch.rand(3, 1, 4, 4)).shape
    torch.Size([3])
    """
    return _config(ResidualImageConfig, shape=shape, context=context, **options).build()


@dataclass(frozen=True)
class GlowConfig(_Image, ModelConfig):
    """Options of `glow`; by default the published ones for CIFAR-10."""

    name: ClassVar[str] = "glow"

    blocks: tuple[int, ...] = (32, 32, 32)  # steps at each scale; a squeeze before each
    limit: float = 2.0  # of the logarithm of a coupling's scale

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("limit", self.limit)
        _scales(self.shape, self.blocks, halve=True, squeeze_first=True)

    def step(self, channels: int) -> list[Transform]:
        """Actnorm, 1x1 convolution, coupling."""
        stay = channels // 2
        net = ConvConditioner(stay, channels - stay, AffineCoupling.outputs, (self.hidden,) * 2, self.context)
        return [
            ActNorm((channels, 1, 1), self.context),
            LULinear(channels, rotation=True),
            AffineCoupling(channels, limit=self.limit, net=net),
        ]

    def assemble(self) -> Flow:
        scales = []
        shapes = _scales(self.shape, self.blocks, halve=True, squeeze_first=True)
        for i, ((channels, _, _), count) in enumerate(zip(shapes, self.blocks, strict=True)):
            steps = [Squeeze(), *(part for _ in range(count) for part in self.step(channels))]
            last = i == len(shapes) - 1
            steps += [Affine((channels, 1, 1), self.context) if last else LearnedPrior(channels, self.context)]
            scales.append(Chain(steps))
        return self.flow([MultiScale(scales)])


def glow(shape: tuple[int, int, int], context: int = 0, **options: Any) -> Flow:
    """Glow (Kingma & Dhariwal 2018) for images in [0, 1], (batch, C, H, W): exact, and one pass in both directions.

    At each scale a squeeze, then ``blocks`` times actnorm, an invertible 1x1 convolution, and an affine coupling whose
    network has a 3x3, a 1x1 and a 3x3 convolution; half of the channels are finished behind each scale but the last,
    with a learned normal prior.

    Args:
        shape: (channels, height, width).
        context: number of conditioning features, 0 for none; they enter every actnorm and every layer of the networks.
        **options: the fields of `GlowConfig`: ``blocks`` (steps at each scale), ``hidden``, ``limit``, ``alpha``,
            ``base``.

    >>> flow = glow((1, 4, 4), blocks=(1, 1), hidden=8)
    >>> flow.log_prob(torch.rand(3, 1, 4, 4)).shape, flow.exact
    (torch.Size([3]), True)
    """
    return _config(GlowConfig, shape=shape, context=context, **options).build()


DEQUANTISATIONS = ("uniform", "variational")


@dataclass(frozen=True)
class FlowPPConfig(_Image, ModelConfig):
    """Options of `flowpp`; by default the published ones for CIFAR-10 with uniform noise."""

    name: ClassVar[str] = "flowpp"

    blocks: tuple[int, ...] = (4, 5)  # couplings at each scale; a squeeze between two
    hidden: int = 104  # channels of a network; published with variational dequantisation: 96
    depth: int = 10  # gated convolutions of a network, each with its attention
    heads: int = 4  # of the attention
    components: int = 32  # of the mixtures
    dropout: float = 0.0  # in training; published: 0.2, and then `log_prob` is random in train mode
    dequantisation: str = "uniform"
    dequantisation_depth: int = 2  # of the networks of the noise

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dequantisation", self.dequantisation, DEQUANTISATIONS)
        check_count("dequantisation_depth", self.dequantisation_depth)
        for shape in _scales(self.shape, self.blocks, halve=False):
            if shape[2] % 2:
                raise ValueError(
                    f"blocks: expected scales of an even width, for their checkerboards; got one of {shape}. Take "
                    "fewer scales, or pad the images."
                )

    def step(self, shape: tuple[int, int, int], split: str, swap: bool, depth: int, context: int) -> list[Transform]:
        """1x1 convolution, coupling."""
        channels, height, width = shape
        read, write = channels // 2, channels - channels // 2
        if split == "checkerboard":
            read, write, width = channels, channels, width // 2
        outputs = MixtureCoupling.outputs_of(self.components)
        size = height, width
        net = AttentionConditioner(
            read, write, outputs, size, self.hidden, depth, self.heads, context, self.dropout
        )
        coupling = MixtureCoupling(channels, components=self.components, net=net, split=split, swap=swap)
        return [*([LULinear(channels)] if channels > 1 else []), coupling]

    def assemble(self) -> Flow:
        shapes = _scales(self.shape, self.blocks, halve=False)
        body: list[Transform] = []
        for i, (shape, count) in enumerate(zip(shapes, self.blocks, strict=True)):
            body += [Squeeze()] if i else []
            # A squeeze brings neighbours into one pixel, whose channels the next two couplings halve.
            for j in range(count):
                split = "half" if i and j < 2 else "checkerboard"
                body += [ActNorm(shape, self.context)]
                body += self.step(shape, split, bool(j % 2), self.depth, self.context)
        body += [Reshape(shapes[-1], self.shape)] if len(shapes) > 1 else []
        return self.flow(body, [self.noise()] if self.dequantisation == "variational" else [])

    def noise(self) -> Transform:
        """Four couplings that know the image and the context, as published."""
        net = PixelFeatures(self.shape[0], context=self.context, dropout=self.dropout)
        steps: list[Transform] = []
        for j in range(4):
            steps += [ActNorm(self.shape)]
            steps += self.step(self.shape, "checkerboard", bool(j % 2), self.dequantisation_depth, net.hidden)
        return Dequantisation(Chain(steps), net)


def flowpp(shape: tuple[int, int, int], context: int = 0, **options: Any) -> Flow:
    """Flow++ (Ho et al. 2019) for images in [0, 1], (batch, C, H, W): exact, with draws by numbers.

    Couplings by the distribution functions of mixtures of logistics, on a checkerboard or on channels, whose networks
    have gated convolutions and attention over all pixels. Behind them actnorm and 1x1 convolutions.

    With ``dequantisation="variational"`` the first step turns uniform noise into noise that knows the image
    (`quarflow.transforms.Dequantisation`): bits per dimension are then the variational bound.

    Args:
        shape: (channels, height, width); the width is even at every scale.
        context: number of conditioning features, 0 for none.
        **options: the fields of `FlowPPConfig`: ``blocks`` (couplings at each scale), ``hidden``, ``depth``, ``heads``,
            ``components``, ``dropout``, ``dequantisation``, ``dequantisation_depth``, ``alpha``, ``base``.

    >>> flow = flowpp((1, 4, 4), blocks=(1, 1), hidden=8, depth=1, components=2)
    >>> flow.log_prob(torch.rand(3, 1, 4, 4)).shape, flow.exact
    (torch.Size([3]), True)
    """
    return _config(FlowPPConfig, shape=shape, context=context, **options).build()
