"""Flower's log, which umbel writes to."""

from __future__ import annotations

from logging import getLogger

log = getLogger("flwr").log
