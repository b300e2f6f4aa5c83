"""The rollout engine: continuous batching over a key-value cache, on the weights of the learner."""
