"""A site's part in anonymous releases: what it checks before it charges a client, and what it sends to the relay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from secrets import SystemRandom

from umbel.privacy.anonymous.link import RelayLink
from umbel.privacy.anonymous.submission import Submission, listed
from umbel.privacy.anonymous.terms import Opening, Terms
from umbel.privacy.gate.identity import Identity
from umbel.privacy.gate.site import Site
from umbel.privacy.secure.seeds import text_of
from umbel.protocol.arrays import Arrays, as_matrix
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import Refused, RelayError
from umbel.protocol.tasks import TrainingSpec


def check(site: Site, seed: int | None, task: TrainingSpec, opening: Opening) -> None:
    """Raise `Refused` if a site releases nothing anonymously for a task; no data are read.

    Releases of a site that draws its noise in another way than the others would have a sender.
    """
    policy = site.policy
    if opening.least < policy.anonymous_least:
        text = f"the server asks for batches of at least {opening.least} releases; this site accepts no less than"
        raise Refused(f"{text} {policy.anonymous_least} (anonymous-least)", code="refused.anonymous-least")
    if policy.clip_norm_floor > task.clip_norm:
        text = f"the clip norm is {task.clip_norm:g}, below this site's clip-norm-floor of {policy.clip_norm_floor:g}"
        fix = "ask for a clip norm that no site has to raise"
        raise Refused(f"{text}: more noise than others have would show the sender; {fix}", code="refused.anonymous")
    if site.insecure_seed:
        text = "insecure-seed is set, so the server knows this site's noise, and recognises its releases; leave it out"
        raise Refused(text, code="refused.anonymous")
    if site.simulated:
        return
    if not policy.relay:
        text = "this site has no relay for anonymous releases: set relay, relay-ca, parties and party-key"
        raise Refused(text, code="refused.no-relay")
    Identity.of(site, seed)
    try:
        relay_of(site).check()
    except RelayError as error:
        # Otherwise clients would be charged in each round for releases that reach no one.
        raise Refused(f"no client is charged: {error.text}", code="refused.relay-away") from error


def submissions(
    site: Site, seed: int | None, terms: Terms, least: int, releases: Arrays, clients: Sequence[ClientInDataset]
) -> list[Submission]:
    r"""Return the submissions of clients' releases, each (m, \*shape), in random order."""
    identity, policy = Identity.of(site, seed), site.policy
    secret = identity.secret(f"umbel anonymous releases {site.ledger_path}")
    least = max(least, policy.anonymous_least)
    own = Submission(terms, identity.name, listed(identity.keys), "", least, policy.colluding_parties, b"")
    found = []
    for client, sealed in zip(clients, terms.sealed(as_matrix(releases)), strict=True):
        # The same for a client that is asked twice in a round, so that it counts once.
        admission = sha256(text_of(secret.hex(), terms.digest.hex(), int(client))).hexdigest()
        one = replace(own, admission=admission, sealed=sealed)
        found.append(replace(one, signature=identity.sign(one.text)))
    SystemRandom().shuffle(found)
    return found


def relay_of(site: Site) -> RelayLink:
    """Return the way to a site's relay."""
    return RelayLink(site.policy.relay, site.policy.relay_ca)


def hand_over(site: Site, found: Iterable[Submission]) -> None:
    """Send submissions to a site's relay.

    Raises
    ------
    RelayError
        The first refusal, after all were sent: the relay may have room again for the next. If the relay is away, no
        more are sent.
    """
    refusals = []
    with relay_of(site) as relay:
        for one in found:
            try:
                relay.submit(one)
            except RelayError as error:
                refusals.append(error)
                if error.code == "relay.away":
                    break
    if refusals:
        raise refusals[0]
