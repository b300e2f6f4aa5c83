"""Runtimes: they connect the verbs of roles to workers."""
