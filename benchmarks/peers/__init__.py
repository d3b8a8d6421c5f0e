"""umbel against other simulators of federated learning: same data, network, clients and rounds.

python -m benchmarks.peers

Each peer does the nearest thing it has, in a virtual environment and a process of its own.
"""
