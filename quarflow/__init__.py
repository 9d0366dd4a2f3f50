"""Exact-likelihood residual flows for PyTorch: densities that can be trusted.

>>> import torch, quarflow as qf
>>> flow = qf.models.quar(features=2, blocks=2, hidden=(8, 8))
>>> history = qf.fit(flow, torch.randn(500, 2), max_steps=20, progress=False)
>>> flow.log_prob(torch.zeros(1, 2)).shape, flow.sample(3).shape
(torch.Size([1]), torch.Size([3, 2]))
"""

from typing import TYPE_CHECKING, Any

from quarflow import bases, interop, models, solvers, transforms
from quarflow.checkpoint import load, save
from quarflow.evaluation import evaluate
from quarflow.flow import Flow
from quarflow.pixels import bits_per_dim
from quarflow.solvers import NotConverged
from quarflow.training import History, TrainingDiverged, fit

if TYPE_CHECKING:
    from quarflow.estimator import FlowDensity as FlowDensity

__version__ = "0.1.0"
__all__ = [
    "Flow",
    "History",
    "NotConverged",
    "TrainingDiverged",
    "bases",
    "bits_per_dim",
    "evaluate",
    "fit",
    "interop",
    "load",
    "models",
    "save",
    "solvers",
    "transforms",
]


def __getattr__(name: str) -> Any:
    # Needs scikit-learn, which importing quarflow does not.
    if name == "FlowDensity":
        from quarflow.estimator import FlowDensity

        return FlowDensity
    raise AttributeError(f"module 'quarflow' has no attribute {name!r}")
