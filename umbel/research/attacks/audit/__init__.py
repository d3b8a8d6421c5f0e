"""The audit of what is claimed: canary clients through the real gate give a lower bound on epsilon.

`bounds` is the statistics, `canaries` the clients and the auditor, `site` the same clients at a deployed site, and
`findings` what is claimed beside what is shown.
"""

from umbel.research.attacks.audit.findings import Audit

__all__ = ["Audit"]
