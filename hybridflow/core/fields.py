"""The vocabulary of columns: every name that a batch may carry, its axis, its type and its meaning.

A row is one piece of one episode. For language models the episode is a response and its steps are tokens (the prompt's
tokens come first on the same time axis); for environments the steps are transitions. Columns on the ``time`` axis of one
batch share their lengths. On the time axis, entry t speaks of step t: ``log_probs[t]`` and ``values[t]`` belong to the
state *before* action t, so for tokens they come from the hidden state at position t - 1.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["FIELDS", "Axis", "Field"]

Axis = Literal["row", "time", "prompt", "object"]


@dataclass(frozen=True)
class Field:
    """One entry of the vocabulary. ``dtype`` is a numpy type name; None leaves it to the environment or data set."""

    axis: Axis
    dtype: str | None
    meaning: str


FIELDS: dict[str, Field] = {
    # identity
    "sample_id": Field("row", "int64", "unique in a run; all randomness of the row derives from it"),
    "group_id": Field("row", None, "rows with equal ids are responses to the same prompt; any integers or strings"),
    "policy_version": Field("time", "int64", "updates that the policy had seen when it chose this step"),
    # language
    "prompt": Field("prompt", "int64", "token ids of the prompt"),
    "prompt_text": Field("object", None, "what the user wrote, before any chat template"),
    "fields": Field("object", None, "dict of the data set's other fields of this row (answer, ...)"),
    "expected_length": Field("row", "int64", "tokens that the response will take, as far as one can tell; 0: no idea"),
    "tokens": Field("time", "int64", "token ids: prompt, then response"),
    "response": Field("object", None, "text of the response, decoded once from its tokens"),
    "demonstrated": Field("row", "bool", "a demonstration to imitate among sampled rows"),
    # preferences
    "preferred": Field("row", "bool", "the better response of its pair (one group_id), or a desirable one"),
    "margins": Field("row", "float32", "how much better the pair's preferred response is, in units of the score"),
    "reference_points": Field("row", "float32", "KL of policy and reference that KTO compares the row's log-ratio with"),
    # environments
    "slot": Field("row", "int64", "which environment of the sampler"),
    "num_steps": Field("row", "int64", "steps to collect in that environment"),
    "observations": Field("time", None, "what the policy saw before the step"),
    "actions": Field("time", None, "what it did"),
    "states": Field("time", "float32", "of the whole environment before the step, for critics of several agents"),
    "final_states": Field("row", "float32", "of the whole environment after the last step of the piece"),
    "final_observations": Field("row", None, "what followed the last step of the piece"),
    "memory": Field("row", None, "what the policy remembered before the first step of the piece; zeros: nothing"),
    "discounts": Field("row", "float32", "what the value of final_observations counts in the return; 0 if nothing follows"),
    "weights": Field("row", "float32", "what the row counts in a loss"),
    # what the policy and the world said
    "response_mask": Field("time", "bool", "True where the actor chose the step; prompt tokens and dropped rows are False"),
    "log_probs": Field("time", "float32", "of the chosen step under the sampling policy"),
    "ref_log_probs": Field("time", "float32", "of the chosen step under the reference policy"),
    "teacher_log_probs": Field("time", "float32", "of the chosen step under the teacher that is distilled"),
    "learner_log_probs": Field("time", "float32", "of the chosen step under the learner's current policy"),
    "terminated": Field("row", "bool", "the episode ended; nothing follows, so nothing is bootstrapped"),
    "truncated": Field("row", "bool", "a limit cut the episode (response length, time limit)"),
    # scores and estimates
    "scores": Field("row", "float32", "what a scorer gave the response"),
    "costs": Field("row", "float32", "what a second scorer gave the response; it has to stay low"),
    "score_failed": Field("row", "bool", "a scorer failed on this row: its scores mean nothing"),
    "cost_failed": Field("row", "bool", "the second scorer failed on this row: its cost means nothing"),
    "greedy_scores": Field("row", "float32", "score of the greedy response to the same prompt (ReMax)"),
    "greedy_failed": Field("row", "bool", "a scorer failed on that response: its score means nothing"),
    "rewards": Field("time", "float32", "reward of each step"),
    "values": Field("time", "float32", "value of the state before the step"),
    "bootstrap_values": Field("row", "float32", "value of the state after the last step"),
    "cost_rewards": Field("time", "float32", "cost of each step, as rewards are made of scores"),
    "cost_values": Field("time", "float32", "expected cost from the state before the step on"),
    "cost_bootstrap_values": Field("row", "float32", "expected cost from the state after the last step on"),
    "cost_advantages": Field("time", "float32", "by how much each step raises the expected cost"),
    "cost_returns": Field("time", "float32", "target of the cost's value of each step"),
    "advantages": Field("time", "float32", "advantage of each step"),
    "returns": Field("time", "float32", "target of the value of each step"),
    "gradients": Field("row", None, "of a loss of a whole rollout, for all parameters of the actor one behind the other"),
    "td_errors": Field("time", "float32", "temporal-difference error of each step"),
}
