"""The end of an audit that runs the target: in its own process, and in the environment that the target ships for.

These modules import only NumPy and the target's own packages, since umbel may not be installed there. `frames` carries
requests, `serve` answers them, and `kinds` knows how each kind of target is asked for a release.
"""


def identify() -> None:
    """Set this process's identity, without which recent versions of Flower make no Message.

    The audit's end puts umbel's own function here, `umbel.protocol.flower.identify`.
    """
