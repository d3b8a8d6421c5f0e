"""The audit of claims: canary clients at the real gate give a lower bound on epsilon.

`bounds` has the statistics, `canaries` the clients and the auditor, `site` the same clients at a deployed site, and
`findings` the claims beside the results.
"""
