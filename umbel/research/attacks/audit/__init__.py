"""The audit of what is claimed: canary clients through the real gate give a lower bound on epsilon.

`bounds` is the statistics, `canaries` the clients and the auditor, `findings` what is claimed beside what is shown,
`observer` the same at the end of a run.
"""

from umbel.research.attacks.audit.observer import Audit

__all__ = ["Audit"]
