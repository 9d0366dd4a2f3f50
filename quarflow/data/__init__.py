"""Where data come from: known densities (``toy``) and small real tables (``tabular``), both as tensors.

>>> import quarflow.data
>>> quarflow.data.toy.toy("moons").sample(5).shape
torch.Size([5, 2])
"""

from quarflow.data import tabular, toy

__all__ = ["tabular", "toy"]
