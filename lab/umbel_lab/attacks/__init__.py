"""Attacks by a curious or malicious server on releases, audits, and the leak meter. No lower floor imports them."""
