"""A stock Flower app behind the gate: one line is new, and each client's release has noise and a price.

Flower's FedAvg learns four classes from 100 clients of 60 points, without the gate and behind it. umbel's in-process
grid stands in for `flwr run`; examples/quickstart is such an app as a project. The gate's noise is of the operating
system: each run differs.
"""

import matplotlib.pyplot as plt
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import umbel
from umbel.simulation.grid import InProcessGrid

GATE = {"noise_multiplier": 2.0, "clip_norm": 1.0, "mechanism": "gaussian", "budget": 10.0, "delta": 1e-5}


def points(rows, seed):  # around four corners, and the corner of each
    draw = torch.Generator().manual_seed(seed)
    angle = (corner := torch.randint(4, (rows,), generator=draw)) * torch.pi / 2
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.4 * torch.randn(rows, 2, generator=draw), corner


def train(message: Message, context: Context):
    """Train the model on the client's points."""
    net = torch.nn.Linear(2, 4)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=0.5), points(60, context.node_config["partition-id"])
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(content), reply_to=message)


def main(picture="gate.svg", clients=100, rounds=5):
    """Run the app without and with the gate, draw the accuracy by rounds, and return it."""
    found = {}
    for name, mods in (("no privacy", []), ("behind the gate", [umbel.Gate(**GATE)])):
        net, (x, y), accuracy = torch.nn.Linear(2, 4), points(2000, 2**31), []
        torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)

        def score(_round, arrays, net=net, x=x, y=y, accuracy=accuracy):
            net.load_state_dict(arrays.to_torch_state_dict())
            accuracy.append((net(x).argmax(1) == y).float().mean().item())

        app = ClientApp(mods=mods)
        app.train()(train)
        grid, first = InProcessGrid(app, {}, clients), ArrayRecord(net.state_dict())
        FedAvg(fraction_evaluate=0.0).start(grid, first, rounds, evaluate_fn=score)
        plt.plot(found.setdefault(name, accuracy), marker="o", label=name)
    plt.gca().set(xlabel="round", ylabel="accuracy", xticks=range(rounds + 1), title="FedAvg, 100 clients")
    plt.legend()
    plt.savefig(picture, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main()
