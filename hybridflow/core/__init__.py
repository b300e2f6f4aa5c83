"""The core abstractions: batches, roles, configuration, errors, metrics, seeding. Imports torch and the stdlib only."""
