"""The metrics of a step: what each key of ``metrics.jsonl`` means. A run may write other keys as well.

A key with ``<names>`` stands for a family: "moved/sampler.rollout-actor.update" is one of "moved/<from>-<to>".
"""

from dataclasses import dataclass, replace

__all__ = ["METRICS", "TIME_SPLIT", "Metric", "format_number", "format_seconds", "metric_of"]


@dataclass(frozen=True)
class Metric:
    """``label`` names an axis or a column; ``unit`` is empty for a number without one."""

    label: str
    unit: str
    meaning: str

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


METRICS: dict[str, Metric] = {
    "step": Metric("step", "", "updates of the policy so far; 0 is the state before the first"),
    "reward/mean": Metric("reward", "", "mean score of the step's responses"),
    "reward/std": Metric("reward spread", "", "standard deviation of the step's scores"),
    "reward/failed": Metric("failed rewards", "responses", "responses on which the reward function failed"),
    "cost/mean": Metric("cost", "", "mean cost of the step's responses"),
    "lambda": Metric("lambda", "", "multiplier of the cost: what a unit of it weighs against a unit of reward"),
    "episode_return/mean": Metric("return", "", "mean undiscounted return of the episodes that ended in the step"),
    "kl": Metric("KL", "nats/token", "estimated KL divergence of the policy from the reference, per token"),
    "entropy": Metric("entropy", "nats/token", "mean entropy of the policy's distribution, per token or environment step"),
    "prompt_length/mean": Metric("prompt length", "tokens", "mean length of the step's prompts"),
    "response_length/mean": Metric("response length", "tokens", "mean length of the step's responses"),
    "response_length/std": Metric("response lengths, spread", "tokens", "standard deviation of the lengths of responses"),
    "response_length/max": Metric("longest response", "tokens", "length of the step's longest response"),
    "response_length/truncated": Metric("truncated", "fraction", "share of responses that the length limit cut"),
    "tokens_per_s": Metric("throughput", "tokens/s", "response tokens of the step / its wall time"),
    "env_steps_per_s": Metric("throughput", "env steps/s", "environment steps of the step / its wall time"),
    "time/generate_s": Metric("generate", "s", "wall time spent sampling"),
    "time/reward_s": Metric("reward", "s", "wall time spent in reward functions and reward models"),
    "time/forward_s": Metric("forward", "s", "wall time of forward passes: reference log-probs, values"),
    "time/learn_s": Metric("learn", "s", "wall time of advantages and updates"),
    "time/queue_s": Metric("queue", "s", "time that calls waited in workers for their inputs; pools add up"),
    "time/transfer_s": Metric("transfer", "s", "time that workers took to pull their calls' inputs; pools add up"),
    "time/step_s": Metric("step time", "s", "wall time of the step, without evaluation and checkpoints"),
    "policy_version": Metric("policy version", "updates", "updates that the sampling policy had seen"),
    "replay/inserted_per_s": Metric("inserted", "rows/s", "transitions added to the replay / wall time of the step"),
    "replay/drawn_per_s": Metric("drawn", "rows/s", "transitions drawn from the replay / wall time of the step"),
    "replay/size": Metric("replay", "rows", "transitions that the replay holds"),
    "replay/occupancy": Metric("replay, occupancy", "fraction", "replay/size as a share of its capacity"),
    "replay/bytes": Metric("replay, bytes", "bytes", "observations and actions that the replay holds, of all processes"),
    "replay/age_steps": Metric("age in steps", "rows", "mean number of transitions added since those drawn were, and they"),
    "replay/age_updates": Metric("age in updates", "updates", "mean number of updates since those drawn were collected"),
    "replay/samples_per_insert": Metric(
        "samples per insert", "", "transitions drawn so far for each that was added after the warmup"
    ),
    "loss/policy": Metric("policy loss", "", "loss of the policy, mean over its minibatches"),
    "loss/value": Metric("value loss", "", "loss of the value model, mean over its minibatches"),
    "grad_norm": Metric("gradient norm", "", "global L2 norm of the policy's gradient before clipping"),
    "actor/mismatch": Metric(
        "mismatch", "nats", "mean difference of log-probabilities between sampler and learner, of the first minibatch"
    ),
    "actor/steps_skipped": Metric(
        "skipped steps", "fraction", 'share of optimizer steps left out as not finite, with guards.non_finite = "skip"'
    ),
    "learning_rate": Metric("learning rate", "", "the policy's learning rate"),
    "ratio/mean": Metric("ratio", "", "mean probability ratio of the new to the sampling policy"),
    "clip_fraction": Metric("clip fraction", "fraction", "share of steps on which the ratio's clipping was active"),
    "eval/score": Metric("evaluation", "", "mean score or return on the evaluation set"),
    "eval/low": Metric("evaluation, low", "", "lower end of the 95 % confidence interval of eval/score"),
    "eval/high": Metric("evaluation, high", "", "upper end of the 95 % confidence interval of eval/score"),
    "eval/count": Metric("evaluation size", "samples", "responses or episodes evaluated"),
    "eval/return_min": Metric("lowest return", "", "of the evaluated episodes"),
    "eval/return_max": Metric("highest return", "", "of the evaluated episodes"),
    "eval/return_std": Metric("deviation of returns", "", "standard deviation among the evaluated episodes"),
    "eval/episode_length": Metric("evaluated episodes", "steps", "mean length of the evaluated episodes"),
    "eval/reward": Metric("evaluated reward", "", "mean of what is trained for, where evaluations have another score"),
    "eval/cost": Metric("evaluated cost", "", "mean cost of the evaluated responses"),
    "memory/rss_gb": Metric("memory", "GB", "resident memory of the driver process (10^9 bytes)"),
    "memory/grown_gb": Metric(
        "memory of models",
        "GB",
        "peak memory so far of the process that has grown most since its start (10^9 bytes); on GPUs, of its tensors",
    ),
    "workers/rss_gb_max": Metric("worker memory", "GB", "largest resident memory of a worker process (10^9 bytes)"),
    "driver/bytes": Metric(
        "driver traffic", "bytes", "bytes through the controller in the step, without text of the source"
    ),
    "moved/<from>-<to>": Metric("moved", "bytes", "bytes that <to> pulled in the step of what <from> wrote"),
}

TIME_SPLIT = ("time/generate_s", "time/reward_s", "time/forward_s", "time/learn_s")


def metric_of(key: str) -> Metric | None:
    """What a key means, also where a part of it differs from run to run; None for a key that is not documented."""
    if not key.startswith("moved/"):
        return METRICS.get(key)
    writer, _, reader = key.removeprefix("moved/").partition("-")
    family = METRICS["moved/<from>-<to>"]
    return replace(family, meaning=family.meaning.replace("<from>", writer).replace("<to>", reader))


def format_number(value: float) -> str:
    """Three significant digits, all digits from 1000 on."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """``34ms``, ``5.1s``, ``51s``, ``2m20s``, ``1h05m``."""
    if seconds < 0.995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
