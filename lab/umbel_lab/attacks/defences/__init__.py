"""Audits of what others ship between a client's training and the wire: Mods, strategy wrappers, filters, functions.

`process` runs a target in its own environment, by `worker`. `claims` holds the claim, the canaries and their guesses,
`laws` tests and fits noise, `probes` finds faults, `report` puts all together, and `command` prints it.
"""
