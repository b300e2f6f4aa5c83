"""Policies as a service: one that acts while its weights change, its HTTP server, and the client of control loops."""
