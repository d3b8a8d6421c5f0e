"""What the table audit leaves behind: a table as people read it, the words under it, and all figures as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from umbel.protocol.home import write_atomically
from umbel.research.attacks.rows.audit import FEW, Finding, Setting
from umbel.research.attacks.rows.tables import QUANTITIES, SERVICE

COLUMNS = ("mode", "ν", "releases", "pure ε", *QUANTITIES)


def tables(findings: Sequence[Finding]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return a heading and the rows of a table for each kind of client, as `COLUMNS` heads them."""
    found = []
    for rows in dict.fromkeys(one.rows for one in findings):
        clients = max(one.clients for one in findings if one.rows == rows)
        own: dict[tuple[str, float | None, int], list[Finding]] = {}
        for one in findings:
            if one.rows == rows:
                own.setdefault((one.mode, one.noise_multiplier, one.releases), []).append(one)
        heading = f"Clients of {rows} row{'s' if rows > 1 else ''} ({clients} attacked)"
        found.append((heading, [_cells(some) for some in own.values()]))
    return found


def notes() -> list[str]:
    """Return the sentences that belong under the tables."""
    return [
        "Root mean square error relative to guessing the mean of other hospitals (1: nothing learnt), with a 95 % "
        "bootstrap interval over clients; in brackets the same in the data's units, or how many services are guessed "
        f"right. Where clients are asked more than once, {FEW} are attacked. Epsilon is the node's own count, the "
        "largest where the attacks on the quantities cost differently.",
        "Each quantity is attacked by itself, by a server that may ask nothing else. A client of several rows has all "
        "services, which is no secret; its payments are all of its rows'. An attack that fails proves nothing.",
    ]


def write(folder: Path, setting: Setting, findings: Sequence[Finding]) -> None:
    """Write ``table.md`` and ``table.csv``."""
    page = [f"# What releases show of a hospital's rows ({Path(setting.dataset).name}, seed {setting.seed})\n"]
    for heading, rows in tables(findings):
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        page.append(f"## {heading}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    page += [f"{note}\n" for note in notes()]
    write_atomically(folder / "table.md", "\n".join(page).encode())
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [entry.name for entry in fields(Finding)], lineterminator="\n")
    writer.writeheader()
    for one in findings:
        writer.writerow(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(one).items()}
        )
    write_atomically(folder / "table.csv", buffer.getvalue().encode())


def file_name(setting: Setting) -> str:
    """Return what the folder of an audit is called."""
    return re.sub(r"[^\w.-]+", "-", f"rows-{Path(setting.dataset).name}")


def _cells(some: Sequence[Finding]) -> tuple[str, ...]:
    first, by_quantity = some[0], {one.quantity: one for one in some}
    nu = "" if first.noise_multiplier is None else f"{first.noise_multiplier:g}"
    claims = [one.claimed for one in some]
    claimed = claims[0] if claims[0] in ("", "none") else max(claims, key=float)
    texts = (_text(by_quantity[quantity]) if quantity in by_quantity else "" for quantity in QUANTITIES)
    return first.mode, nu, str(first.releases or ""), claimed, *texts


def _text(one: Finding) -> str:
    amount = f"{_short(one.relative)} ({_short(one.low)} to {_short(one.high)})" if one.low < one.high else "1"
    if one.quantity == SERVICE:
        assert one.right is not None
        return f"{amount} [{one.right:.0%}]"
    digits = "< 0.001" if one.error < 0.001 else f"{one.error:,.0f}" if one.error >= 100 else f"{one.error:.3g}"
    return f"{amount} [{digits} {one.unit}]".replace(" ]", "]")


def _short(number: float) -> str:
    return f"{number:.2f}" if number >= 0.095 else f"{number:.1g}" if number >= 1e-4 else "0"
