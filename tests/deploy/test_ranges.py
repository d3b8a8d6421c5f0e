"""Three sites with tables of their own are asked for the ranges of ten columns, over TLS and in one secure sum."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from typer.testing import CliRunner

from tests.deploy.processes import Deployment
from tests.strategies.test_secure_average import keys
from umbel.cli.main import app
from umbel.data import Column, Schema
from umbel.data.importers import from_dataframe
from umbel.models.ranges import CELLS
from umbel.privacy.site.journal import Journal
from umbel.protocol.ranges import before

pytestmark = [
    pytest.mark.rest(
        twin="tests/privacy/site/test_ranges.py::test_a_question_is_answered_and_charged_like_a_participation"
    ),
    pytest.mark.timeout(1800),
]

SITES, PEOPLE = 3, 700
SIZES = {f"x{power}": 2.0**power for power in range(-4, 23, 3)}  # nine columns; the tenth is the target


def write_table(folder: Path, number: int) -> Path:
    """Write a site's rows: each column has numbers of its own size, of both signs, and the tenth is their sum."""
    generator, rows = np.random.default_rng(number), 2 * PEOPLE
    frame = pd.DataFrame({name: size * generator.uniform(-1.9, 1.9, rows) for name, size in SIZES.items()})
    frame["sum"], frame["who"] = frame.sum(axis=1), [f"p{number}-{row % PEOPLE}" for row in range(rows)]
    folder.mkdir(parents=True)
    frame.to_csv(folder / "people.csv", index=False)
    return folder / "people.csv"


def umbel(*words: object) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return str(done.output)


def test_three_sites_answer_a_question_about_ten_columns_and_their_schema_has_scales(tmp_path: Path) -> None:
    columns = [Column(name=name, type="number") for name in (*SIZES, "sum")]
    schema = Schema(client=Column(name="who", type="text"), target=columns[-1], features=columns[:-1])
    bare, question, ranged = (tmp_path / f"{name}.toml" for name in ("bare", "question", "ranged"))
    bare.write_text(tomli_w.dumps(schema.entries()))
    clients = SITES * PEOPLE
    umbel("ranges", bare, "--clients", clients, "--release", "secure", "--sites", SITES, "--out", question)
    names = [f"site-{number}" for number in range(SITES)]
    with Deployment(tmp_path / "deployment") as deployment:
        paths, listed = keys(tmp_path / "keys", *names)
        for number, name in enumerate(names):
            table = write_table(tmp_path / name, number)
            (deployment.folder / name).mkdir()
            Journal.create(deployment.folder / name / "ledger.jsonl")
            deployment.start_node(name, **{
                "data-path": str(table), "reader": f"umbel.data.table:read schema={bare}", "release": "secure",
                "parties": listed, "party-key": paths[name], "mechanisms": "discrete-gaussian",
                "budget": "4 delta=1e-5", "ranges": "all epsilon=0.5",
            })  # fmt: skip
        deployment.wait_until_online()
        asked = tomllib.loads(question.read_text())
        run = deployment.submit(**asked | {"wait": "nodes=3 seconds=90"})
        assert deployment.wait(run) == "finished:completed", deployment.server_log(run)
        told = umbel("ranges", run.folder, "--schema", bare, "--out", ranged)
        charges = [row for node in deployment.nodes.values() for row in node.charges]
    assert len(charges) == clients
    assert {(row["kind"], int(row["n"])) for row in charges} == {("secure", 10 * CELLS)}
    assert f"{clients:,}" in told
    found = Schema.read(ranged)
    for column in found.features:
        # Numbers within 1.9 of a power of two lie within the next one.
        assert (column.scale, column.offset) == (2 * SIZES[column.name], 0)
    assert found.target.scale == 2 * SIZES["x20"]
    assert "by=secure" in before(found.provenance)
    again = from_dataframe(pd.read_csv(tmp_path / "site-0" / "people.csv"), schema=ranged)
    assert np.abs(again.dataset.features).max() < 1
