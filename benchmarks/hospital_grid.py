"""Time the paper's hospital grid against the bare loop, both on all cores of this machine, in one go.

    python benchmarks/hospital_grid.py [--seeds 10]

Both do the same 240 runs along the RMSE (and umbel nothing else); a run ends when its own validation says so, so
times are compared a round. Each side pays for starting its processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bare_hospital
from umbel.data import find_dataset, open_dataset
from umbel.research.experiments import hospital
from umbel.research.experiments.sweep import sweep


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = hospital.SEEDS,
) -> None:
    """Print how long both take, and the ratio of their times a round."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        every = hospital.specs(Path(scratch), seeds)
        specs = [s for s in every if s.config["strategy"] == "group-privacy" and not s.config["loss"]]
        print(f"{len(specs)} runs on {cores} cores", flush=True)
        began = time.perf_counter()
        results = sweep(specs, Path(scratch))
        ours = time.perf_counter() - began
        rounds = sum(result.measures["rounds"] for result in results)
        print(
            f"umbel      {ours:7.1f} s  {rounds} rounds  {1e3 * ours * cores / rounds:.2f} ms of a core a round",
            flush=True,
        )

        began = time.perf_counter()
        with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
            theirs_rounds = sum(pool.map(bare, [spec.config for spec in specs], chunksize=4))
        theirs = time.perf_counter() - began
        each = 1e3 * theirs * cores / theirs_rounds
        print(f"bare loop  {theirs:7.1f} s  {theirs_rounds} rounds  {each:.2f} ms of a core a round")
        print(f"ratio a round {(ours / rounds) / (theirs / theirs_rounds):.2f}")


def bare(config: dict[str, Any]) -> int:
    """Do one run by the bare loop; return its rounds."""
    torch.set_num_threads(1)
    path = find_dataset(config["dataset"])
    data = bare_hospital.Data.read(path, open_dataset(path).manifest.train)
    _, _, rounds = bare_hospital.run(
        data, config["hypotheses"], config["noise-multiplier"], config["seed"], config["step-size"], config["rounds"],
        config["patience"], config["clients-per-round"], config["validation-clients-per-round"],
    )  # fmt: skip
    return rounds


if __name__ == "__main__":
    typer.run(main)
