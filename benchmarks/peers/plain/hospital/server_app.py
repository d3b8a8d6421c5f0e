"""The ServerApp: sample, send and receive, k-means, average."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from . import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; write when they began, and the seconds and the loss of each."""
    config = context.run_config
    seed = int(config["seed"])
    torch.manual_seed(seed)
    rng = random.Random(seed)
    hypotheses = [task.network().state_dict() for _ in range(int(config["hypotheses"]))]
    training, validating = roles(grid, len(np.load(Path(str(config["data"])) / "offsets.npy")) - 1)
    began, rounds = time.time(), []
    for number in range(int(config["rounds"])):
        start = time.perf_counter()
        sample = rng.sample(training, int(config["clients-per-round"]))
        replies = ask(grid, "train", broadcast(hypotheses), sample, number)
        hypotheses = aggregate([reply.array_records["arrays"] for reply in replies], hypotheses)
        sample = rng.sample(validating, int(config["validation-clients-per-round"]))
        replies = ask(grid, "evaluate", broadcast(hypotheses), sample, number)
        loss = float(np.mean([reply.metric_records["metrics"]["loss"] for reply in replies]))
        rounds.append({"seconds": time.perf_counter() - start, "loss": loss})
    Path(str(config["results"])).write_text(json.dumps({"began": began, "rounds": rounds}), encoding="utf-8")


def roles(grid: Grid, clients: int) -> tuple[list[int], list[int]]:
    """Wait for all SuperNodes; return those that train and those that validate."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    messages = [Message(RecordDict(), node, "query") for node in nodes]
    trains = {
        reply.metadata.src_node_id: reply.content.metric_records["role"]["trains"]
        for reply in grid.send_and_receive(messages)
    }
    return [node for node in nodes if trains[node]], [node for node in nodes if not trains[node]]


def broadcast(hypotheses: Sequence[task.State]) -> RecordDict:
    """Return the content of a message with the hypotheses."""
    return RecordDict({f"hypothesis-{j}": ArrayRecord(state) for j, state in enumerate(hypotheses)})


def ask(grid: Grid, kind: str, content: RecordDict, nodes: Sequence[int], number: int) -> list[RecordDict]:
    """Send a message to each node and return what they answer."""
    messages = [Message(content, node, kind, group_id=str(number)) for node in nodes]
    replies = list(grid.send_and_receive(messages))
    if errors := [reply.error.reason for reply in replies if reply.has_error()]:
        raise RuntimeError(f"{len(errors)} clients failed: {errors[0]}")
    return [reply.content for reply in replies]


def aggregate(releases: Sequence[ArrayRecord], hypotheses: Sequence[task.State]) -> list[task.State]:
    """Return the means of the clusters of the releases."""
    points = np.stack([task.flatten(record.to_torch_state_dict()).double().numpy() for record in releases])
    means = kmeans(points, np.stack([task.flatten(state).double().numpy() for state in hypotheses]))
    return [task.unflatten(torch.from_numpy(mean).float(), hypotheses[0]) for mean in means]


def kmeans(points: NDArray[np.float64], centroids: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the centroids of Lloyd's iterations; one without points stays where it is."""
    labels = np.full(len(points), -1)
    while True:
        following = np.square(points[:, None] - centroids[None]).sum(2).argmin(1)
        if np.array_equal(following, labels):
            return centroids
        labels, centroids = following, centroids.copy()
        for j in np.unique(labels):
            centroids[j] = points[labels == j].mean(0)
