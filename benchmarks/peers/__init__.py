"""umbel against other simulators: same data, network, clients and rounds; each in an environment and a process."""
