"""Flower Mods, for the client of any Flower app."""
