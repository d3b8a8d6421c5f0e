"""The commands of ``umbel``: one module for each, with its function or group of functions."""
