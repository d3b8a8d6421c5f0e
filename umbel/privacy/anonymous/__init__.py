"""Anonymous releases: a server reads the releases of a round, and not which client made which.

A relay stands between the sites and the server, and other people run it.

1. With a round's task, the server sends a public key (`umbel.privacy.anonymous.terms.Opening`).
2. A site encrypts each client's release to that key, signs it, and sends it to the relay
   (`umbel.privacy.anonymous.submission`). To the server all sites reply the same.
3. The server closes the batch once. The relay hands on the ciphertexts, shuffled, if they are enough, and forgets them
   (`umbel.privacy.anonymous.batches`).

The relay can read no release. The server does not learn who sent which, nor when. Together they can: against both, each
client has the guarantee of its release alone, which the ledger charges.

Only releases count that a listed site has signed; the relay and all sites list the same sites. So a server cannot fill
a batch with its own releases. A batch holds releases from the same hypotheses, for the same task, in the same round, to
the same key. A server that tells two sites different things gets two batches, and each has to be large enough.
"""
