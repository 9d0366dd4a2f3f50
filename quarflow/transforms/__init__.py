"""Invertible maps ``x -> (z, ladj)``; the contract is `quarflow.transforms.base.Transform`."""

from quarflow.transforms.autoregressive import MaskedAffine
from quarflow.transforms.base import Chain, Inverse, Transform
from quarflow.transforms.bnaf import BNAF
from quarflow.transforms.coupling import AdditiveCoupling, AffineCoupling, LearnedPrior, MixtureCoupling
from quarflow.transforms.dequantisation import Dequantisation
from quarflow.transforms.elementwise import ActNorm, Affine, Asinh, Logit, Quantiles, Sigmoid, Standardise, Support
from quarflow.transforms.mixing import LULinear, Permutation, Reverse, Whiten
from quarflow.transforms.planar import Planar, Radial, Sylvester
from quarflow.transforms.reshape import MultiScale, Reshape, Squeeze
from quarflow.transforms.residual import ConditionedResidual, Residual

__all__ = [
    "BNAF",
    "ActNorm",
    "AdditiveCoupling",
    "Affine",
    "AffineCoupling",
    "Asinh",
    "Chain",
    "ConditionedResidual",
    "Dequantisation",
    "Inverse",
    "LULinear",
    "LearnedPrior",
    "Logit",
    "MaskedAffine",
    "MixtureCoupling",
    "MultiScale",
    "Permutation",
    "Planar",
    "Quantiles",
    "Radial",
    "Reshape",
    "Residual",
    "Reverse",
    "Sigmoid",
    "Squeeze",
    "Standardise",
    "Support",
    "Sylvester",
    "Transform",
    "Whiten",
]
