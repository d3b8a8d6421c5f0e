"""Methods by name, or by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.personal.auto import auto
from umbel.client.personal.bayes import bayes
from umbel.client.personal.calibrate import calibrate, mixture
from umbel.client.personal.own import Generators, Own, Task
from umbel.client.personal.tune import as_it_is, fine_tune, interpolate
from umbel.models.prior import Prior
from umbel.privacy.gate.policy import Personal
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import import_by_name, unknown_name

Method = Callable[[Task], Own]

METHODS: Mapping[str, Method] = {
    Personal.NO: as_it_is,
    Personal.FINE_TUNE: fine_tune,
    Personal.INTERPOLATE: interpolate,
    Personal.CALIBRATE: calibrate,
    Personal.MIXTURE: mixture,
    Personal.BAYES: bayes,
    Personal.AUTO: auto,
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
    found = import_by_name(name)
    if not callable(found):
        raise ConfigError(f"personalise {name!r} is no function of a client's task", code="config.personalise")
    own: Method = found
    return own


def make_own(
    how: str,
    learner: Learner,
    hypotheses: Arrays,
    cohort: Cohort,
    update: LocalUpdate,
    generators: Generators,
    prior: Prior | None = None,
) -> Own:
    r"""Return each client's own predictor, made only from hypotheses (k, \*shape) and the client's rows.

    A client without rows gets the first hypothesis unchanged, or all of them with equal weights. Models with local
    parameters already are each client's own, and do not belong here.

    Parameters
    ----------
    how : str
        See `method`.
    update : LocalUpdate
        Settings for clients' further training, if a method trains.
    generators : callable
        Returns the generator that shuffles each client's rows, from its beginning.
    prior : Prior, optional
        The differences of clients around each hypothesis, estimated by the server from releases; for `Personal.BAYES`.
    """
    return method(how)(Task(learner, hypotheses, cohort, update, generators, prior))
