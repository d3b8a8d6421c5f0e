"""The report of a run: `page` combines the figures of `figures` and the warnings of `alarms`."""

from umbel.server.report.page import render
from umbel.server.report.view import View

__all__ = ["View", "render"]
