"""Invertible maps ``x -> (z, ladj)``; the contract is `quarflow.transforms.base.Transform`."""

from quarflow.transforms.base import Chain, Inverse, Transform
from quarflow.transforms.elementwise import ActNorm, Affine, Logit, Sigmoid, Standardise
from quarflow.transforms.mixing import LULinear, Permutation, Reverse
from quarflow.transforms.residual import Residual

__all__ = [
    "ActNorm",
    "Affine",
    "Chain",
    "Inverse",
    "LULinear",
    "Logit",
    "Permutation",
    "Residual",
    "Reverse",
    "Sigmoid",
    "Standardise",
    "Transform",
]
