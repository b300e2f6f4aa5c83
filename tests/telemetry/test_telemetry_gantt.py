"""The picture of who runs when: every task is there, nothing overlaps, nothing is cut."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from xml.etree import ElementTree

from hybridflow.core.metrics import Span
from hybridflow.telemetry.gantt import Lane, gantt_page

Box = tuple[float, float, float, float]

STEP = [
    Span("sampler.weights", "transfer", 0.0, 0.5, "rollout/0"),
    Span("sampler.rollout", "generate", 0.5, 4.0, "rollout/0"),
    Span("sampler.rollout", "generate", 0.5, 6.0, "rollout/2"),
    Span("judge<b>.score", "queue", 0.0, 6.5, "main/0"),
    Span("judge<b>.score", "forward", 6.5, 0.001, "main/0"),
    Span("script.advantages", "compute", 6.501, 0.0, ""),
    Span("learner.update", "train", 6.501, 3.499, "main/0"),
]
LANES = [
    Lane("main", "4 x a100-80g", {"learner": 30e9, "judge<b>": 1e6, "working": 49e9}, 80e9),
    Lane("rollout", "4 x a100-80g", {"sampler": 14e9}, 80e9),
]


def moved(spans: list[Span], seconds: float) -> list[Span]:
    return [Span(s.name, s.kind, s.start_s + seconds, s.duration_s, s.worker) for s in spans]


STEPS = [STEP, moved(STEP, 10.0), moved(STEP, 20.0)]


def picture(steps: list[list[Span]] = STEPS) -> ElementTree.Element:
    page = gantt_page("PPO", "a headline", LANES, steps, {"Pools": ("a note", [("pool", "devices"), ("main", "4")])})
    assert "http" not in page.replace("http-equiv", "") and "judge<b>" not in page and "judge&lt;b&gt;" in page
    assert ">Pools</h2>" in page and "a note" in page and ">devices</th>" in page
    found = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert found
    return ElementTree.fromstring(found[0])


def bars(svg: ElementTree.Element) -> dict[str, list[tuple[str, Box]]]:
    """By the top of a row: what each group tells, and where it is."""
    rows = defaultdict(list)
    for group in svg.iter("g"):
        title, rect = group.find("title"), group.find("rect")
        assert title is not None and rect is not None and title.text
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        rows[rect.attrib["y"]].append((title.text, (x, y, width, height)))
    return rows


def texts(svg: ElementTree.Element) -> Iterator[tuple[str, Box]]:
    """Every text, and where it is if letters are 0.55 of their size wide."""
    for element in svg.iter("text"):
        told = "".join(element.itertext())
        size = float(element.attrib.get("font-size", 12))
        width, anchor = len(told) * 0.55 * size, element.attrib.get("text-anchor", "start")
        x = float(element.attrib["x"]) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        yield told, (x, float(element.attrib["y"]) - size, width, size)


def test_every_task_of_every_step_is_told() -> None:
    told = [text for row in bars(picture()).values() for text, _ in row]
    for step in (1, 2, 3):
        assert f"sampler.rollout, step {step}: 6.0s, the first worker after 4.0s" in told
        assert f"sampler.weights: transfer, step {step}: 500ms" in told
        assert f"learner.update, step {step}: 3.5s" in told and f"judge<b>.score, step {step}: 1ms" in told
        assert f"script.advantages, step {step}: 0ms" in told
    assert "learner 30 GB" in told and not [text for text in told if "queue" in text]


def test_bars_are_where_their_seconds_are() -> None:
    svg = picture()
    boxes = {text: box for row in bars(svg).values() for text, box in row}
    first, third = (boxes[f"learner.update, step {step}: 3.5s"] for step in (1, 3))
    scale = (third[0] - first[0]) / 20.0
    assert abs(first[2] - 3.499 * scale) < 0.2
    assert abs(first[0] - boxes["sampler.weights: transfer, step 1: 500ms"][0] - 6.501 * scale) < 0.2


def test_nothing_overlaps_and_nothing_is_cut() -> None:
    svg = picture()
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for row in bars(svg).values():
        for (_, left), (_, right) in itertools.pairwise(sorted(row, key=lambda bar: bar[1])):
            assert left[0] + left[2] <= right[0] + 1.0
    found = [*texts(svg)]
    for text, (x, y, w, h) in found:
        assert x >= 0 and x + w <= width + 1 and y >= 0 and y + h <= height, text
    for (one, (x, y, w, h)), (other, (x2, y2, w2, h2)) in itertools.combinations(found, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y, (one, other)


def test_steps_that_end_together_share_a_label() -> None:
    told = [text for text, _ in texts(picture([STEP, moved(STEP, 0.01), moved(STEP, 0.02)]))]
    assert "step 1 done" in told and "step 2 done" not in told
