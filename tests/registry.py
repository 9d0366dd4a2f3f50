"""One registry of named constructors; every law in test_laws.py holds over all of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import nn

import quarflow as qf
from quarflow import transforms as t
from quarflow.flow import Flow
from quarflow.nn.activations import ACTIVATIONS
from quarflow.nn.bounds import LIPSCHITZ
from quarflow.nn.conditioned import ConditionedNet
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import Banach, Bracketing
from quarflow.transforms.elementwise import SUPPORTS

FEATURES = (1, 2, 5, 13)
CONTEXTS = (0, 3)


def _residual(features: int, context: int, solver: object = None, **options: object) -> t.Residual:
    return t.Residual(TriangularNet(features, hidden=(4, 3), context=context, **options), solver=solver)


def _conditioned(features: int, context: int, solver: object = None, **options: object) -> t.ConditionedResidual:
    net = ConditionedNet(features, (4, 3), conditioner=(8,), context=context, **options)
    return t.ConditionedResidual(net, solver)


CONDITIONED: dict[str, dict[str, object]] = {
    "default": {},
    "banach": {"solver": Banach(), "sigma": 0.8},
    "bracketing": {"solver": Bracketing()},
    "power": {"bound": "power"},
    "gram": {"bound": "gram", "trick": False},
    "diagonal": {"lipschitz": "diagonal", "activation": "elu"},
    "plain": {"trick": False, "activation": "sine"},
    "clipswish": {"activation": "clipswish"},
}

RELATIVES: dict[str, Callable[[int, int], t.Transform]] = {
    "MaskedAffine": lambda features, context: t.MaskedAffine(features, context, hidden=(16, 16)),
    "MaskedAffine, tanh": lambda features, context: t.MaskedAffine(features, context, (16,), activation="tanh"),
    "Inverse(MaskedAffine)": lambda features, context: t.Inverse(t.MaskedAffine(features, context, hidden=(16,))),
    "AdditiveCoupling": lambda features, context: t.AdditiveCoupling(features, context, hidden=(16, 16)),
    "AffineCoupling": lambda features, context: t.AffineCoupling(features, context, hidden=(16, 16)),
    "MixtureCoupling": lambda features, context: t.MixtureCoupling(features, context, hidden=(16, 16)),
    "Planar": lambda features, context: t.Planar(features, context),
    "Radial": lambda features, context: t.Radial(features, context),
    "Sylvester": lambda features, context: t.Sylvester(features, context),
    "Sylvester, rank 1": lambda features, context: t.Sylvester(features, context, rank=1),
    "BNAF": lambda features, context: t.BNAF(features, context, hidden=(6, 6)),
    "BNAF, shallow": lambda features, context: t.BNAF(features, context, hidden=(5,)),
}
RELATIVE_MODELS: dict[str, dict[str, object]] = {
    "maf": {"hidden": (8,)},
    "iaf": {"hidden": (8,)},
    "nice": {"hidden": (8,), "activation": "silu"},
    "realnvp": {"hidden": (8, 8)},
    "planar": {"mixing": "lu"},
    "radial": {"base": "student"},
    "sylvester": {"rank": 1, "actnorm": False},
    "bnaf": {"hidden": (4,), "mixing": "permute"},
}

TRANSFORMS: dict[str, Callable[[int, int], t.Transform]] = {
    "affine": lambda d, c: t.Affine(d, c),
    "actnorm": lambda d, c: t.ActNorm(d, c),
    "standardise": lambda d, c: t.Standardise(d),
    "permutation": lambda d, c: t.Permutation(torch.randperm(d)),
    "reverse": lambda d, c: t.Reverse(),
    "whiten": lambda d, c: t.Whiten(d),
    "lu": lambda d, c: t.LULinear(d),
    "lu, rotation": lambda d, c: t.LULinear(d, rotation=True),
    "quar and coupling": lambda d, c: t.Chain(
        [t.MixtureCoupling(d, c, (8,), components=2, swap=True), t.LULinear(d, rotation=True), _residual(d, c)]
    ),
    "logit of sigmoid": lambda d, c: t.Chain([t.Sigmoid(), t.Logit(1e-6)]),
    "sigmoid": lambda d, c: t.Sigmoid(),
    "inverse of support": lambda d, c: t.Inverse(t.Support((SUPPORTS * d)[:d])),
    "supports": lambda d, c: t.Chain([t.Inverse(t.Support(["unit"] * d)), t.Support((["positive", "unit"] * d)[:d])]),
    "asinh": lambda d, c: t.Asinh([i % 2 == 0 for i in range(d)]),
    "quantiles": lambda d, c: t.Quantiles(d, knots=5),
    "inverse": lambda d, c: t.Inverse(t.LULinear(d)),
    "inverse of residual": lambda d, c: t.Inverse(_residual(d, c)),
    "chain": lambda d, c: t.Chain([t.ActNorm(d, c), _residual(d, c), t.Reverse(), _residual(d, c)]),
    "residual, banach": lambda d, c: _residual(d, c, Banach(), sigma=0.8),
    "residual, bracketing": lambda d, c: _residual(d, c, Bracketing()),
    "residual, power": lambda d, c: _residual(d, c, bound="power", lipschitz="network"),
    "residual, deep": lambda d, c: t.Residual(TriangularNet(d, (3, 4, 2, 3), c)),
} | {
    f"residual, {lipschitz}, {activation}, {'trick' if trick else 'plain'}{', gram' if gram else ''}": (
        lambda d, c, o={"lipschitz": lipschitz, "activation": activation, "trick": trick}, g=gram: _residual(
            d, c, bound="gram" if g else None, **o
        )
    )
    for lipschitz, activation, trick, gram in product(LIPSCHITZ, ACTIVATIONS, (True, False), (True, False))
    if not (gram and lipschitz == "network")  # gram is what network has anyway
} | {
    f"conditioned, {name}": lambda d, c, o=options: _conditioned(d, c, **o) for name, options in CONDITIONED.items()
} | RELATIVES

MODELS: dict[str, Callable[[int, int], Flow]] = {
    f"quar, {lipschitz}, {activation}, {mixing}": (
        lambda d, c, o={"lipschitz": lipschitz, "activation": activation, "mixing": mixing}: qf.models.quar(
            d, c, blocks=2, hidden=(4, 3), **o
        )
    )
    for lipschitz, activation, mixing in product(LIPSCHITZ, ACTIVATIONS, qf.models.MIXINGS)
} | {
    f"quar, conditioned, {mixing}": lambda d, c, m=mixing: qf.models.quar(
        d, c, block="conditioned", blocks=2, hidden=(4, 3), conditioner=(8,), mixing=m
    )
    for mixing in ("reverse", None)
} | {
    f"quar, {base} base": lambda d, c, b=base: qf.models.quar(d, c, blocks=1, hidden=(4,), base=b)
    for base in qf.bases.BASES
} | {
    name: (lambda d, c, n=name, o=options: getattr(qf.models, n)(d, c, blocks=2, **o))
    for name, options in RELATIVE_MODELS.items()
} | {
    # The roulette's draws have a file of their own, test_logdet.py: here is what it is an estimate of.
    f"residual, {bound}": lambda d, c, b=bound: qf.models.residual(
        d, c, blocks=2, hidden=(6, 5), logdet="full", bound=b, trick=b == "gram"
    )
    for bound in ("gram", "power")
}


# Affine steps have no bound: at larger weights two of them already lose every digit of an inverse.
SCALES = {name: 0.3 for name in MODELS if name in ("iaf", "realnvp") or "conditioned" in name}


def feature_counts(name: str) -> tuple[int, ...]:
    """The numbers of features that ``name`` takes: a coupling needs two."""
    couples = name.lower().endswith("coupling") or name in ("nice", "realnvp")
    return tuple(d for d in FEATURES if d > 1 or not couples)


def far(module: nn.Module, scale: float = 0.7, seed: int = 0) -> nn.Module:
    """The module in float64 with random parameters and statistics far from where they start."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("deviation"):
                p.copy_(torch.rand(p.shape, generator=generator) + 0.5)
            elif name.endswith(("lower", "upper")):
                # Random triangular matrices are ill-conditioned beyond any tolerance unless their rows are short.
                p.copy_(0.5 * scale * torch.randn(p.shape, generator=generator, dtype=p.dtype) / len(p) ** 0.5)
            elif p.is_floating_point() and not name.endswith(("mask", "anchor")):
                p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def data(rows: int, features: int, context: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and context, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, context, generator=generator, dtype=torch.float64) if context else None
