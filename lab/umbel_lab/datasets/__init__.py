"""Recipes of further datasets, which `umbel data make` finds by an entry point. They are scripts, as umbel's are."""
