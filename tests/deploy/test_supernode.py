"""A site's SuperNode waits at umbel's pace; that it works, `test_processes.py` sees."""

from __future__ import annotations

import pytest
from typer import Exit

from umbel.deploy import supernode


def test_flower_waits_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(supernode.time, "sleep", waited.append)
    monkeypatch.setattr(supernode, "run_supernode", lambda arguments, sleep, *_: [sleep(3.0), sleep(0.5)])
    with pytest.raises(Exit):
        supernode.run(["--insecure"])
    assert waited == [0.5, 0.1]
