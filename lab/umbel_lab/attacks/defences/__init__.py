"""Audits of what others ship between a client's training and the wire: Mods, strategy wrappers, filters, functions.

`process` runs a target in its own environment, by the modules in `worker`. `trials` counts guesses, `laws` tests and
fits noise, `claims` holds the three kinds of figures, `probes` finds faults, `report` puts all together, and `page`
prints it.
"""
