"""The end of an audit that runs the target: in its own process, and in the environment that the target ships for.

These modules import only NumPy and the target's own packages, since umbel may not be installed there. `frames` carries
requests, `serve` answers them, and `kinds` knows how each kind of target is asked for a release.
"""
