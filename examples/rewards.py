"""Rewards are plain functions: they get the prompt, the response and the row's fields by name, and return a score."""


def brief_and_right(response: str, answer: str) -> dict[str, float]:
    """1 for the right answer, less 0.05 for every word beyond the first; ``words`` shows among the metrics."""
    words = response.split()
    right = float(bool(words) and words[0].strip(".,!") == answer)
    return {"score": right - 0.05 * max(0, len(words) - 1), "words": float(len(words))}
