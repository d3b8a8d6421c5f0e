"""Across machines: certificates, the guarded server, a site's node, a demonstration. See docs/operate."""
