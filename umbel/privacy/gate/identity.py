"""A site's identity among the sites that list each other's keys, for secure sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from umbel.privacy.gate.site import Site
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.signatures import (
    PublicKey,
    line_of,
    public_half,
    public_key,
    signed,
    simulated_key,
    simulated_keys,
    simulated_name,
)


@dataclass(frozen=True)
class Identity:
    """A site among others.

    Attributes
    ----------
    name : str
        Its name in the list.
    keys : mapping of str to PublicKey
        The listed sites' keys, its own included.
    sign : callable
        Returns the site's signature of a text.
    """

    name: str
    keys: Mapping[str, PublicKey]
    sign: Callable[[bytes], bytes] = field(repr=False)

    @classmethod
    def of(cls, site: Site, seed: int | None) -> Identity:
        """Return the identity of a site; `Refused` if it lists no sites, `SiteError` if not itself."""
        if site.simulated:
            key = simulated_key(seed, site.first)
            return cls(simulated_name(site.first), simulated_keys(seed, site.step), key.sign)
        policy = site.policy
        if not (policy.parties and policy.party_key):
            text = "this site lists no sites to work with: set parties and party-key"
            raise Refused(text, code="refused.secure-parties")
        keys = {name: public_key(name, line) for name, line in policy.party_keys.items()}
        path = Path(policy.party_key).expanduser()
        own = line_of(public_half(path))
        for name, key_of in keys.items():
            if line_of(key_of) == own:
                return cls(name, keys, partial(signed, key=path))
        raise SiteError(f"parties does not list the key of {path}; add this site itself", code="site.not-a-party")
