"""The ServerApp: Flower's own FedAvg."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, make_data
from quickstart.task import test as test_fn

app = ServerApp()


def global_evaluate(server_round: int, arrays: ArrayRecord):
    """Score the model on public rows."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_fn(net, make_data(2000, seed=2**31))
    return MetricRecord({"loss": loss, "accuracy": accuracy})


@app.main()
def main(grid: Grid, context: Context):
    """Learn one model from all clients."""
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=0.0)
    rounds = context.run_config["num-server-rounds"]
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds, evaluate_fn=global_evaluate)
