"""HybridFlow: RLHF, RL post-training of language models and classical RL as one dataflow."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.context import HybridFlowContext, compute_gae

__all__ = ["HybridFlowContext", "compute_gae"]

__version__ = "0.1.0"

# Threads that wait for each other must not spin: on a machine that is busy with anything else, spinning makes torch ten and
# more times slower (a step of the demo 35 s instead of 2.3 s beside one other process), and on an idle one it gains
# nothing. OpenMP reads this once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Large tensors in huge pages, where the kernel leaves that to the program (Linux): fresh memory is 6 times cheaper to fill,
# which is 10 to 15 % of a rollout and 10 % of an update, for 20 % more memory. torch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> Any:
    """What programs import, loaded with torch when it is first asked for."""
    if name in __all__:
        return getattr(importlib.import_module("hybridflow.context"), name)
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
