"""Across machines: certificates, a health check, a demonstration. See docs/deployment.md."""
