"""Pure tensor mathematics of reinforcement learning: no state, no processes, no configuration."""
