"""The report of a run: `page` combines the figures of `figures` and the warnings of `alarms`."""

from umbel.server.report.page import View, render

__all__ = ["View", "render"]
