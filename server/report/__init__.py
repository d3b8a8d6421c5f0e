"""The report of a run: `page` puts together what `figures` draws and what `alarms` warns of."""

from server.report.compare import check
from server.report.page import render
from server.report.view import HeldOut, Measured, View

__all__ = ["HeldOut", "Measured", "View", "check", "render"]
