"""HybridFlow: RLHF, RL post-training of language models and classical RL as one dataflow."""

__version__ = "0.1.0"
