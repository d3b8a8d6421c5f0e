"""Each client's own predictor, made at its node from a run's hypotheses; it never leaves the node and costs no privacy.

`tune`, `calibrate`, `bayes`, and `auto`, which chooses among them, hold the methods; `keep` writes what a site keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from umbel.client.personal import auto, bayes, calibrate, tune
from umbel.client.personal.bayes import as_regression, closed_form
from umbel.client.personal.predictors import Generators, Predictors, Task
from umbel.privacy.site.policy import Personal
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import import_by_name, unknown_name

__all__ = ["Generators", "Predictors", "Task", "as_regression", "closed_form", "method"]

Method = Callable[[Task], Predictors]

METHODS: Mapping[str, Method] = {
    Personal.NO: tune.as_it_is,
    Personal.FINE_TUNE: tune.fine_tune,
    Personal.INTERPOLATE: tune.interpolate,
    Personal.CALIBRATE: calibrate.calibrate,
    Personal.MIXTURE: calibrate.mixture,
    Personal.BAYES: bayes.bayes,
    Personal.AUTO: auto.auto,
}


def method(name: str) -> Method:
    """Return the method `name`, or a user's as ``package.module:function``.

    Raises
    ------
    ConfigError
        If there is none; the text lists the choices.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ConfigError(unknown_name("personalise", name, METHODS), code="config.personalise")
    found: Method = import_by_name(name)
    if not callable(found):
        raise ConfigError(f"personalise {name!r} is no function of a client's task", code="config.personalise")
    return found
