"""Methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.personal.auto import auto
from umbel.client.personal.bayes import bayes
from umbel.client.personal.calibrate import calibrate, mixture
from umbel.client.personal.own import Own
from umbel.client.personal.papers import apfl, ditto, fedrep, knn_per, mr_mtl
from umbel.client.personal.task import Generators, Task
from umbel.client.personal.tune import as_it_is, fine_tune, interpolate
from umbel.models.prior import Prior
from umbel.privacy.gate.policy import Personal
from umbel.protocol.arrays import Arrays

METHODS: Mapping[Personal, Callable[[Task], Own]] = {
    Personal.NO: as_it_is,
    Personal.FINE_TUNE: fine_tune,
    Personal.INTERPOLATE: interpolate,
    Personal.CALIBRATE: calibrate,
    Personal.MIXTURE: mixture,
    Personal.BAYES: bayes,
    Personal.AUTO: auto,
    Personal.DITTO: ditto,
    Personal.MR_MTL: mr_mtl,
    Personal.APFL: apfl,
    Personal.FEDREP: fedrep,
    Personal.KNN_PER: knn_per,
}


def make_own(
    how: Personal,
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
    update : LocalUpdate
        Settings for clients' further training, if a method trains.
    generators : callable
        Returns the generator that shuffles each client's rows, from its beginning.
    prior : Prior, optional
        The differences of clients around each hypothesis, estimated by the server from releases; for `Personal.BAYES`.
    """
    return METHODS[how](Task(learner, hypotheses, cohort, update, generators, prior))
