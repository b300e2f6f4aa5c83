"""Faults from outside, on a seeded schedule, and what becomes of a run."""
