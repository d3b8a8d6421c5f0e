"""Strategies by import path, as in ``strategy = "umbel_lab.strategies:ClusteredFL"``."""

from umbel_lab.strategies.cfl import ClusteredFL
from umbel_lab.strategies.r_dpcfl import RDPCFL

__all__ = ["RDPCFL", "ClusteredFL"]
