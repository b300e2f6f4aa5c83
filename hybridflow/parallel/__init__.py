"""Parallelism over processes: meshes and their lines, tensor parallelism, pipelines."""
