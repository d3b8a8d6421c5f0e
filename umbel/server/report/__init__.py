"""The report of a run: `page` puts together what `figures` draws and what `alarms` warns of."""

from umbel.server.report.compare import check
from umbel.server.report.page import render
from umbel.server.report.view import HeldOut, Measured, View

__all__ = ["HeldOut", "Measured", "View", "check", "render"]
