"""Torch runs on one thread, here and in child processes: for small networks, waiting threads cost more than they give."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
