"""Where data come from: known densities (``toy``), small real tables (``tabular``) and pictures (``images``).

>>> import quarflow.data
>>> quarflow.data.toy.toy("moons").sample(5).shape
torch.Size([5, 2])
"""

from quarflow.data import images, tabular, toy

__all__ = ["images", "tabular", "toy"]
