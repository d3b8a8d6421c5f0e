"""Each client's own predictor, made at its node from a run's hypotheses; it never leaves the node and costs no privacy.

`make` calls methods by name or by import path: `tune`, `calibrate`, `bayes`, and `auto`, which chooses among them.
`keep` writes the predictors that a site keeps.
"""

from umbel.client.personal.bayes import as_regression, closed_form
from umbel.client.personal.make import make_own, method
from umbel.client.personal.own import Generators, Own, Task

__all__ = ["Generators", "Own", "Task", "as_regression", "closed_form", "make_own", "method"]
