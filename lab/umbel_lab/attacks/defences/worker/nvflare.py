"""NVFlare's filters, which see a client's difference of weights as a DXO."""

from __future__ import annotations

from typing import Any

import numpy as np

from .kinds import Asked, Kind, Left, Refusal


class Filter(Kind):
    """A filter of results: `process` takes and returns a Shareable that holds a DXO."""

    name = "NVFlare filter"

    def release(self, asked: Asked) -> Left:
        from nvflare.apis.dxo import DXO, DataKind, from_shareable
        from nvflare.apis.fl_context import FLContext

        dxo = DXO(DataKind.WEIGHT_DIFF, data={name: value.copy() for name, value in asked.update.items()})
        shareable = self.target.process(dxo.to_shareable(), FLContext())
        if shareable is None:
            raise Refusal("the filter returns nothing")
        data: dict[str, Any] = from_shareable(shareable).data
        return Left({name: np.asarray(value) for name, value in data.items()})
