"""The report of a run: `page` combines the figures of `figures` and the warnings of `alarms`."""

from umbel.server.report.compare import check
from umbel.server.report.page import render
from umbel.server.report.view import HeldOut, Measured, View

__all__ = ["HeldOut", "Measured", "View", "check", "render"]
