"""Rewards of the built-in tasks. Standard library only: reward processes import this module and start fast."""

import re

__all__ = ["exact", "number", "positions"]


def number(response: str, answer: str) -> float:
    """1 if the first whole number in the response is the answer; "1,234" is read as 1234."""
    found = re.search(r"-?[0-9]+", re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", response))
    return float(found is not None and (found.group().lstrip("0") or "0") == answer)


def exact(response: str, answer: str) -> float:
    """1 if the response, without space around it, is the answer."""
    return float(response.strip() == answer)


def positions(response: str, answer: str) -> dict[str, float]:
    """Share of positions that hold the right character, of the longer of both texts.

    So only a response of the right length that ends there gets 1. The metric ``exact`` says how many did.
    """
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return {"score": right / max(len(response), len(answer)), "exact": float(response == answer)}
