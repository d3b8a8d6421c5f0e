"""How long a round of secure sums takes over real sites, beside site release, in the same call.

    python -m benchmarks.secure_sites [--sites 3,10,20] [--rounds 6] [--parameters 1000] [--out FILE]

Each site is `umbel site start`, with its data, ledger and key, behind a separate SuperLink with TLS
(`benchmarks.many_sites`). Site release takes one exchange a round, and a secure sum three. The first round, in which
the sites introduce themselves, is left out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from rich.markup import escape
from rich.table import Table

from benchmarks.many_sites import Reading, measure, numbers_in
from benchmarks.measure import Out, benchmark, console
from umbel.protocol.signatures import line_of

_NOISE: dict[str, Any] = {
    "mechanism": "discrete-gaussian",
    "clipping": "public",
    "hypotheses": 2,
    "noise-multiplier": 5.0,
}
_POLICY = 'mechanisms="discrete-gaussian" release="any" min-clients=1'


def main(
    sites: Annotated[str, typer.Option(help="Numbers of sites.")] = "3,10,20",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run.")] = 6,
    parameters: Annotated[int, typer.Option(min=2, help="Of the model, which is linear.")] = 1000,
    out: Out = None,
) -> None:
    """Print a row a number of sites."""
    headings = ("sites", "s a round, site release", "s a round, secure sums", "ratio", "what failed")
    table = Table(*headings, title=f"Secure sums, two hypotheses of {parameters:,} parameters", title_justify="left")
    with benchmark(out, "httpx", "uvicorn", "sqlalchemy"):
        try:
            for number in numbers_in(sites):
                both = [
                    measure(
                        number, rounds, parameters, real=True, policies=_policies, **_NOISE, strategy=strategy,
                    )
                    for strategy in ("site-average", "secure-average")
                ]  # fmt: skip
                table.add_row(*map(escape, _cells(number, both)))
                print("  ".join(_cells(number, both)), file=sys.stderr)  # the next takes minutes
        finally:
            console.print(table)


def _cells(number: int, both: Sequence[Reading]) -> tuple[str, ...]:
    times = [reading.rounds or [float("nan")] for reading in both]
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    seconds = [f"{statistics.median(own):.1f} ({min(own):.1f} to {max(own):.1f})" for own in times]
    failed = ", ".join(f"{count} x {what}" for one in both for what, count in one.failures.most_common(2))
    return str(number), *seconds, f"{ratio:.2f}", failed


def _policies(home: Path, names: Sequence[str]) -> list[str]:
    """Write a key for each site, and return entries of their configurations, which list all."""
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    for name, key in keys.items():
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        (home / f"{name}.party").write_bytes(private)
    listed = " ".join(f"{name}={line_of(key.public_key()).split()[1]}" for name, key in keys.items())
    return [f'{_POLICY} parties="{listed}" party-key="{home / name}.party"' for name in names]


if __name__ == "__main__":
    typer.run(main)
