"""Datasets, built-in tasks, tokenizers and chat templates, environments."""
