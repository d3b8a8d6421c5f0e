"""The report of a run: `page` puts together what `figures` draws and what `alarms` warns of."""

from server.report.page import render

__all__ = ["render"]
