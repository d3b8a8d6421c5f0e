"""Contestants take turns at a task: umbel in this process, each peer in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import in_process
from benchmarks.measure import Ratio, Reading, console, interleave, show
from benchmarks.peers.rivals import PEERS, Absent, Peer, Rival
from benchmarks.peers.tasks import brief_of

# umbel as it is, and with as much left out as each peer leaves out.
OURS: dict[str, dict[str, Any]] = {
    "umbel": {},
    "umbel, no noise": {"noise-multiplier": 0.0},
    "umbel, IFCA, no noise": {"strategy": "ifca", "noise-multiplier": 0.0},
    "umbel, FedAvg": {"strategy": "fedavg"},
    "umbel, FedAvg, no noise": {"strategy": "fedavg", "noise-multiplier": 0.0},
}


def compare(
    task: str, config: Mapping[str, Any], pythons: Mapping[str, Path], folder: Path, times: int, cores: int
) -> None:
    """Let umbel and the peers do a task in turns, and print what they took."""
    brief = brief_of(config, cores)
    brief.write(folder)
    contestants: dict[str, Callable[[], Reading]] = {
        name: partial(in_process.go, {**config, **changes}) for name, changes in OURS.items()
    }
    alike: dict[str, str] = {}
    with ExitStack() as processes:
        for name, python in pythons.items():
            for variant, (title, like) in PEERS[name].contestants.items():
                rival = Rival(python, name, variant, folder, cores)
                processes.callback(rival.stop)
                try:
                    rival.go()  # whoever cannot do this is out, and the others go on
                except Absent as reason:
                    absent(PEERS[name], reason)
                else:
                    contestants[title], alike[title] = rival.go, like
        readings = interleave(contestants, times)
    settings = brief.settings
    show(
        f"{task}: {len(settings.train[0])} clients train and {len(settings.validate[0])} validate in each of "
        f"{brief.rounds} rounds, k = {config['hypotheses']}",
        readings,
        "umbel",
    )
    for title, like in alike.items():
        console.print(f"{title}: {Ratio.of(readings[title], readings[like])} times {like}", highlight=False)


def absent(peer: Peer, reason: Absent) -> None:
    """Say why a peer is not in the table."""
    console.print(f"{peer.version}: not measured: {reason}", highlight=False)
