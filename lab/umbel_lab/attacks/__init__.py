"""Attacks by a curious or malicious server on releases, and audits."""
