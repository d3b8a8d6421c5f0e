"""The table audit: what a malicious server reconstructs of a hospital's rows from what the hospital releases.

It picks hypotheses and task within what a site's policy lets through, and estimates by the mechanism's law.
"""
