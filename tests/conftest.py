"""One thread for torch, here and in child processes: these networks are small, and waiting threads cost more than they give."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
