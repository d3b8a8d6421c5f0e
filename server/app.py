"""The ServerApp: a run from its configuration to its folder."""

from __future__ import annotations

import re
import time
from logging import INFO
from pathlib import Path

import safetensors
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protocol.errors import ConfigError
from protocol.flower import log
from protocol.home import umbel_home
from protocol.messages import price
from server.plane import Album
from server.report import render
from server.rounds import State, initial_hypotheses, run_rounds
from server.run_folder import RunFolder, versions
from server.settings import Settings
from server.summary import Narrator

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the run config names."""
    settings = Settings.parse(context.run_config)
    strategy = settings.strategy
    strategy.summary()
    strategy.roster(grid)

    multiplier = float(settings.train_config["noise_multiplier"])  # type: ignore[arg-type]
    cost = price(settings.model.num_parameters, multiplier)
    narrator = Narrator(settings.model, settings.manifest, cost, strategy.radius.mode)
    if context.run_config["resume"]:
        folder, state, album = _resume(context, settings, grid)
    else:
        folder = RunFolder.make(umbel_home() / "runs", _name(context, settings))
        folder.write_config(context.run_config)
        start = initial_hypotheses(settings, grid)
        state = State(hypotheses=start, best=start)
        album = Album(state)

    def after_round(state: State) -> None:
        log(INFO, narrator.round_line(state.history[-1], settings.rounds))
        folder.write_nodes(strategy.roster(grid).nodes)
        folder.write_round(state, strategy.participations, cost)
        if album.add(state, strategy.outcome):
            folder.write_releases(album.to_bytes())

    run_rounds(settings, grid, state, after_round)
    if strategy.findings:
        folder.write_findings(strategy.findings)
    folder.write_report(
        render(folder.path.name, narrator, state, strategy.participations, album, dict(context.run_config), versions())
    )
    strategy.tell(grid, state.best, settings.round_timeout)
    for line in narrator.closing_lines(state):
        log(INFO, line)
    log(INFO, "The results are in this folder; open report.html first:")
    log(INFO, "%s", folder.path)


# What may change when a run goes on.
_FREE = {
    "resume", "rounds", "patience", "validate-every", "leak-meter", "min-releases", "device", "engine", "min-nodes",
    "node-wait", "round-timeout", "quorum",
}  # fmt: skip


def _resume(context: Context, settings: Settings, grid: Grid) -> tuple[RunFolder, State, Album]:
    """Return the folder of an interrupted run and where it stands, after its last finished round."""
    given = Path(str(context.run_config["resume"])).expanduser()
    path = given if given.is_absolute() else umbel_home() / "runs" / given
    if not path.is_dir():
        raise ConfigError(f"resume: there is no run {path}; give the name of a folder in {umbel_home() / 'runs'}")
    folder = RunFolder(path)
    try:
        saved, state, spent = folder.read()
        nodes = folder.read_nodes()
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"resume: {path} holds no run that finished a round: {error}") from error
    for key, was in saved["config"].items():
        if key not in _FREE and context.run_config.get(key) != was:
            raise ConfigError(f"resume: {key} was {was!r} and is {context.run_config.get(key)!r}; set it as it was")
    # Entries after the last round of training evaluate what it left, and come again at the end.
    over = not state.history[-1].asked or not state.best_round
    while not state.history[-1].asked:
        state.history.pop()
    if len(state.history) > settings.rounds or (over and len(state.history) == settings.rounds):
        raise ConfigError(f"resume: the run has done its {len(state.history)} rounds; raise rounds to go on")
    state.stopped = ""
    # A file does not keep the order of the model's parameters.
    names = list(settings.model.shapes)
    state.best = {name: state.best[name] for name in names}
    state.hypotheses = {name: state.hypotheses[name] for name in names}
    settings.strategy.resume(grid, nodes, spent)
    releases = path / "releases.safetensors"
    album = Album.of_bytes(state, releases.read_bytes()) if releases.exists() else Album(state)
    log(INFO, "The run goes on after round %d: %s", len(state.history), path)
    return folder, state, album


def _name(context: Context, settings: Settings) -> str:
    """Return a name that sorts by time and tells runs of one second apart."""
    what = settings.manifest.name if settings.manifest else settings.model.name
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{what}-{context.run_config['strategy']}")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{context.run_id % 10**6:06d}"
