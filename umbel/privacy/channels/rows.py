"""The channel of rows: each client's model leaves as it was trained, since the noise of training hides each row.

It asserts that training did so, keeps the update within the clip norm, and adds nothing.
"""

from __future__ import annotations

from umbel.privacy.channels import Flags, Ids, Place
from umbel.privacy.channels.client import Client, ClientSanitiser, Released
from umbel.protocol.arrays import Arrays, Labels, all_finite
from umbel.protocol.errors import Refused
from umbel.protocol.tasks import TrainingSpec


class RowsSanitiser(ClientSanitiser):
    """A site's releases for one task, without further noise."""

    @staticmethod
    def check_hidden(place: Place, task: TrainingSpec) -> None:
        """Raise `Refused` unless training hides each row."""
        if task.row_privacy is None:
            raise Refused("nothing leaves without noise", code="refused.unsanitised")

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> Released:
        """Return what leaves of charged clients; raise `Refused` if training cannot have added its noise."""
        if not (self.place.site.simulated or all(map(all_finite, results.values()))):
            # It would leave as the bare hypothesis.
            raise Refused("what was trained to hide rows is not finite, so it has no noise", code="refused.result")
        return super().leave(clients, results, chosen, paid)


class Rows(Client):
    """Each client's model, as it was trained with noise that hides its rows."""

    sanitiser = RowsSanitiser
