"""The commands of ``umbel``: a module each, with the function or the group of functions that it is."""
