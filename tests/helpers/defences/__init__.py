"""Targets for audits: six that keep what they claim, and Mods that are wrong in one way each."""
