"""The table audit: a malicious server reconstructs a hospital's rows from the hospital's releases.

It chooses hypotheses and task within a site's policy, and estimates with the mechanism's distribution.
"""
