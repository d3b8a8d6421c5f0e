"""Methods of personalisation by import path, as in ``personalise = "umbel_lab.personal:ditto"``."""

from umbel_lab.personal.memory import knn_per
from umbel_lab.personal.papers import apfl, ditto, fedrep, mr_mtl

__all__ = ["apfl", "ditto", "fedrep", "knn_per", "mr_mtl"]
