"""An ordinary Flower app with stock FedAvg, whose clients release through umbel's gate."""
