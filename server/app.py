"""The ServerApp: a run from its configuration to its folder."""

from __future__ import annotations

import re
import time
from logging import INFO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from federation import umbel_home
from protocol import price
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
    folder = RunFolder.make(umbel_home() / "runs", _name(context, settings))
    folder.write_config(context.run_config)

    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    album = Album(state)

    def after_round(state: State) -> None:
        log(INFO, narrator.round_line(state.history[-1], settings.rounds))
        folder.write_round(state, strategy.participations, cost)
        if album.add(state, strategy.outcome):
            folder.write_releases(album.to_bytes())

    run_rounds(settings, grid, state, after_round)
    if strategy.findings:
        folder.write_findings(strategy.findings)
    folder.write_report(
        render(folder.path.name, narrator, state, strategy.participations, album, dict(context.run_config), versions())
    )
    for line in narrator.closing_lines(state):
        log(INFO, line)
    log(INFO, "The results are in this folder; open report.html first:")
    log(INFO, "%s", folder.path)


def _name(context: Context, settings: Settings) -> str:
    """Return a name that sorts by time and tells runs of one second apart."""
    what = settings.manifest.name if settings.manifest else settings.model.name
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{what}-{context.run_config['strategy']}")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{context.run_id % 10**6:06d}"
