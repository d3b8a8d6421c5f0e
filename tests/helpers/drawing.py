"""Figures that are left blank: to draw them takes most of the time of a short run."""

from __future__ import annotations

import pytest
from markupsafe import Markup

import umbel.server.report.figures


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """Have figures of reports hold their words alone."""

    def blank(name: str, alt: str, *_: object, **__: object) -> Markup:
        return Markup('<svg role="img" aria-label="{}"></svg>').format(alt)

    patch.setattr(umbel.server.report.figures, "svg", blank)
