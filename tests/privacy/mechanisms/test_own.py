"""A mechanism of one's own, as the docs have it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.ledgers import proven
from tests.helpers.models import write_module
from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import gap, guarantee
from umbel.privacy.mechanisms import Mechanism
from umbel.privacy.site.charges import Limits
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Kind, Release
from umbel.server.summary import Summary
from umbel.simulation.in_process import play, run_config

DOCS = Path(__file__).resolve().parents[3] / "docs" / "guides" / "extend.md"
RADII = np.ones((20_000, 1))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the class in the docs."""
    [code] = re.findall(
        r"```python\n(import math\n.*?class Coordinates.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL
    )
    return write_module(tmp_path, monkeypatch, code) + ":Coordinates"


def test_its_noise_is_what_it_says(own: str) -> None:
    """Laplace noise of scale nu r; false alarm 1e-6."""
    mechanism: Mechanism = mechanisms.load(own)(2.0)
    noise = mechanism.noise([1], RADII, iter([np.random.default_rng(i) for i in range(len(RADII))]))
    assert stats.kstest(noise[:, 0], stats.laplace(scale=2.0).cdf).pvalue > 1e-6
    assert mechanism.deviation(1) == pytest.approx(noise.std(), rel=0.05)
    clipped = mechanism.constrain(np.array([[3.0, -1.0], [0.1, 0.2]]), 1.0)
    np.testing.assert_allclose(clipped, [[0.75, -0.25], [0.1, 0.2]])


@pytest.mark.parametrize("choice", [0.0, 1.0])
def test_a_mechanism_without_a_known_bound_guarantees_nothing_and_says_so(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: float
) -> None:
    code = f"from {own.partition(':')[0]} import Coordinates\n\n\nclass Ball(Coordinates):\n"
    code += "    def pure(self, n, distance):\n        return None\n\n"
    code += "    def loss(self, n, distance):\n        return None\n"
    name = write_module(tmp_path, monkeypatch, code) + ":Ball"
    changes = {"mechanism": name, "clipping": "public", "choice_epsilon": choice, "noise_multiplier": 2.0}
    run = play(run_config("synthetic", rounds=2, restarts=1, **changes))
    assert guarantee({run.setup.release: 3}) is None
    assert "has no known bound" in gap(run.setup.release)
    summary = Summary.of(run.setup)
    assert "none" in next(iter(summary.guarantee_lines(1)))
    assert not Limits(budget=Fraction(8)).bounds(run.setup.release)


def test_a_loss_that_is_a_number_is_refused(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"from {own.partition(':')[0]} import Coordinates\n\n\nclass Number(Coordinates):\n"
    code += "    def loss(self, n, distance):\n        return distance / self.noise_multiplier\n"
    name = write_module(tmp_path, monkeypatch, code) + ":Number"
    with raises(ConfigError, "config.loss", name, "float"):
        gap(Release(Kind.TRAIN, 3, 2.0, Clipping.PUBLIC, mechanism=name))


def test_a_run_counts_it(own: str) -> None:
    """nu = 2 and choice-epsilon 1, three times: 3 * (2/2 + 1)."""
    changes = {"mechanism": own, "clipping": "public", "choice_epsilon": 1.0, "noise_multiplier": 2.0}
    config = run_config("synthetic", max_participations=3, rounds=2, restarts=1, **changes)
    run = play(config)
    found = proven({run.setup.release: 3}, 1e-5)
    assert found.pure == 6
    assert 5.9 < found.epsilon <= 6
