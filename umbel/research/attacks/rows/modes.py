"""The modes of release that the table audit tries."""

from __future__ import annotations

import tomllib

from umbel.protocol.project import CONFIGS
from umbel.protocol.release import Clipping, ReleaseBy
from umbel.research.attacks.modes import SITE, Mode

EPSILONS = (2, 4, 8, 16)
"""Of ``configs/hospital-epsilon-*.toml``."""
MULTIPLIERS = (1.0, 3.0, 10.0)
"""nu of the paper's heuristic."""
ASKED_OFTEN = 24
"""Releases of a client in the 500 rounds of ``configs/hospital.toml``, where 100 of 2062 take part in each."""
_EVERYWHERE = {"max-hypotheses": 10, "max-local-epochs": 100, "clip-norm-floor": 0.01}


def modes() -> list[Mode]:
    """Return all modes."""
    found = [Mode("no noise", 0.0, policy={**_EVERYWHERE, "allow-unsanitised": True})]
    for releases in (1, ASKED_OFTEN):
        found += [
            Mode("paper's heuristic", nu, releases=releases, policy={**_EVERYWHERE, "min-noise-multiplier": nu})
            for nu in MULTIPLIERS
        ]
    found += [formal(epsilon) for epsilon in EPSILONS]
    found += [formal(epsilon, ReleaseBy.SITE) for epsilon in EPSILONS]
    return [*found, *(formal(epsilon, ReleaseBy.SITE, others_known=True) for epsilon in EPSILONS[2:])]


def formal(epsilon: int, by: ReleaseBy = ReleaseBy.CLIENT, others_known: bool = False) -> Mode:
    """Return the mode of ``configs/hospital-epsilon-*.toml``, at a site that accepts that and a budget of `epsilon`."""
    file = CONFIGS / f"hospital-epsilon-{epsilon}.toml"
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    nu, choice = float(config["noise-multiplier"]), float(config["choice-epsilon"])
    policy = {
        **_EVERYWHERE,
        "clipping": "public",
        "min-noise-multiplier": nu,
        "max-choice-epsilon": choice,
        "budget": float(epsilon),
        "max-participations": int(config["max-participations"]),
        "release": str(by),
    }
    name = "formal, a client's release"
    if by is ReleaseBy.SITE:
        policy["min-clients"] = SITE
        name = f"formal, a site's sums of {SITE}" + (", others known" if others_known else "")
    return Mode(name, nu, choice, Clipping.PUBLIC, by, others_known=others_known, policy=policy)
