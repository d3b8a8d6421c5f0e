"""Secure sums: a server learns the sum of what several parties send, and nothing else about any of them.

A party is a site, or a node with a single client. In each round there are three exchanges:

1. Each party sends its numbers with its share of the noise, hidden by masks, and the secrets behind the masks in shares
   that only other parties can read (`umbel.privacy.channels.secure.party.Party.mask`).
2. The server says who has answered, the survivors. Each survivor signs this set, and signs only one (`Party.agree`).
3. The server shows the signatures. Each survivor reveals what removes the masks from the sum of exactly these survivors
   (`Party.open`); the server takes the masks away (`umbel.privacy.channels.secure.sums.Sum`).

This is the protocol of Bonawitz et al. (2017) against a malicious server, with keys that last for a run as in Flamingo
(Ma et al., 2023), and with noise in shares of which the surplus is taken back as in Dordis (Jiang et al., 2024).

Names: n parties are asked, a of them may work together with the server, t have to sign, u survive.
"""
