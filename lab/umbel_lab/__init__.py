"""umbel's laboratory: attacks, audits of anybody's code, the papers' experiments, and plug-ins by import path."""
