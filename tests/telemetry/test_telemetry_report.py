"""The report: its HTML, what it refuses, and how a real browser draws it."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hybridflow.core.errors import UserError
from hybridflow.telemetry.charts import Run, main_charts, smooth, smoothing_span
from hybridflow.telemetry.report import write_report
from hybridflow.telemetry.result import wilson_interval
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.tracker import Tracker

# the page's own script asks for nothing; this one notes what the browser refused, and opens every part
WATCH = """<script>const page = document.documentElement.dataset;
addEventListener("securitypolicyviolation", event => page.refused = event.blockedURI);
addEventListener("error", event => page.failed = event.message);
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(part => part.open = true);
  const fetched = performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:"));
  page.fetched = fetched.length;
});</script>"""

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000"]


def make_run(path: Path, algorithm: str, steps: int) -> Path:
    run = RunDirectory.create(path, f'algorithm = "{algorithm}"\n[actor]\nmodel = "tiny"\n[train]\nsteps = {steps}\n')
    with Tracker(run) as tracker:
        tracker.log(0, {"eval/score": 0.25, "eval/low": 0.14, "eval/high": 0.4, "eval/count": 40})
        for step in range(1, steps + 1):
            metrics = {"reward/mean": step / steps, "kl": math.nan if step == 3 else 1e-3 * step, "custom/<x>": 1.0}
            metrics |= {"tokens_per_s": 900.0 + step, "grad_norm": 1.0, "entropy": 1.0, "response_length/mean": 4.0}
            metrics["moved/sampler.rollout-actor.update"] = 1e6 + step
            metrics |= {"time/generate_s": 1.0, "time/reward_s": 0.1, "time/learn_s": 1.5, "time/step_s": 2.75}
            tracker.log(step, metrics)
            tracker.log_samples(
                step, [{"prompt": "<b>2+2?", "response": f"</script>{step}", "score": 0.5, "group_id": "g"}]
            )
        low, high = wilson_interval(30, 40)
        tracker.log(steps, {"eval/score": 0.75, "eval/low": low, "eval/high": high, "eval/count": 40})
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "first", "grpo", 24), make_run(folder / "second", "ppo", 6)]


@pytest.fixture(scope="module")
def text(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(runs, tmp_path_factory.mktemp("out") / "sub" / "report.html").read_text(encoding="utf-8")


def without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def charts_of(text: str) -> list[dict[str, dict[str, dict[str, dict[str, str]]]]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_tells_what_happened(text: str) -> None:
    shown = without_scripts(text)
    for words in (
        "2 runs compared",
        "grpo · tiny · 24 steps in 1m06s",
        "mean of the first and last 2 steps",
        "0.25 → 0.75",
    ):
        assert words in shown
    assert "95 % CI [0.14, 0.4] → [0.598, 0.858]\nstep 0 → 24 · n 40" in shown
    assert '<td data-label="key"><div class="text">algorithm</div></td>' in shown  # a difference of the two runs
    assert "actor.model" not in shown


def test_the_page_escapes_what_a_model_wrote(text: str) -> None:
    assert "&lt;b&gt;2+2?" in text and "&lt;/script&gt;24" in text and "</script>24" not in text
    assert "<b>2+2?" not in without_scripts(text)


def test_the_page_asks_for_nothing(text: str) -> None:
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", without_scripts(text))
    assert "default-src 'none'" in text
    assert text.count("plotly.js v") == 1


def test_axes_have_labels_and_units(text: str) -> None:
    layouts = [chart["layout"] for chart in charts_of(text)]
    assert all(layout["xaxis"]["title"]["text"] == "step" for layout in layouts)
    titles = [layout["yaxis"]["title"]["text"] for layout in layouts]
    assert {"reward", "KL (nats/token)", "throughput (tokens/s)", "time (s)", "custom/&lt;x&gt;"} <= set(titles)
    assert "moved (bytes)" in titles
    assert "Bytes that actor.update pulled in the step of what sampler.rollout wrote" in without_scripts(text)


def test_pools_that_overlap_are_told() -> None:
    for learn_s, told in ((0.25, False), (0.75, True)):
        record = {"step": 1, "time/step_s": 1.0, "time/generate_s": 0.5, "time/learn_s": learn_s}
        (chart,) = main_charts([Run("a", "#000000", {}, "", [record], [])])
        assert ("pools that run side by side add up" in chart.note) == told


def test_one_run(runs: list[Path], tmp_path: Path) -> None:
    text = write_report(runs[:1], tmp_path / "one.html").read_text(encoding="utf-8")
    assert "<h1>first</h1>" in text and "Differences" not in text
    assert not any(chart["layout"]["showlegend"] for chart in charts_of(text) if "barmode" not in chart["layout"])


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "fresh", "seed = 1\n")
    text = write_report([tmp_path / "fresh"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no training step recorded" in text and "Nothing to draw yet" in text


def test_a_running_run_can_be_reported(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[1], tmp_path / "running")
    with (tmp_path / "running" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    assert "6 steps" in write_report([tmp_path / "running"], tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_of_the_same_name_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(runs[1], tmp_path / parent / "run")
    text = write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "report.html").read_text(
        encoding="utf-8"
    )
    assert " a/run</h3>" in text and " b/run</h3>" in text
    assert "The runs have the same configuration." in text


def test_mistakes_are_told_in_one_line(runs: list[Path], tmp_path: Path) -> None:
    cases = [
        ([], tmp_path / "r.html", "no run given"),
        ([tmp_path / "none"], tmp_path / "r.html", "no such run directory"),
        ([tmp_path], tmp_path / "r.html", "not a run directory"),
        ([runs[0], runs[0]], tmp_path / "r.html", "given twice"),
        ([runs[0]], runs[0] / "config.toml" / "r.html", "can't write"),
        ([runs[0]], tmp_path, "can't write"),
    ]
    for given, output, words in cases:
        with pytest.raises(UserError, match=words) as error:
            write_report(given, output)
        assert "\n" not in str(error.value)


def test_a_single_step_and_a_constant(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed = 1\n")
    run.metrics.write_text('{"step": 1, "episode_return/mean": 21, "learning_rate": 1e-05}\n')
    text = write_report([run.path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>21</b>" in text and "1 step<" in text
    rate = next(chart for chart in charts_of(text) if chart["layout"]["yaxis"]["title"]["text"] == "learning rate")
    assert rate["layout"]["yaxis"]["range"] == pytest.approx([5e-6, 1.5e-5])


def test_smoothing() -> None:
    assert [smoothing_span(count) for count in (1, 19, 20, 400, 9000)] == [1, 1, 2, 40, 50]
    np.testing.assert_allclose(smooth(np.array([3.0, 5.0]), 1), [3, 5])
    np.testing.assert_allclose(smooth(np.full(9, 2.0), 4), 2)
    np.testing.assert_allclose(smooth(np.array([0.0, 1.0]), 3), [0, 1 / 1.5])


def render(page: Path, profile: Path) -> str:
    """The page's DOM after its scripts ran in a headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine: the page was checked as text only")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_browser_draws_every_chart(text: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(text.replace("<title>", f"{WATCH}<title>", 1), encoding="utf-8")
    dom = render(page, tmp_path / "profile")
    root = re.search(r"<html[^>]*>", dom)
    assert root and "data-refused" not in root[0] and "data-failed" not in root[0] and 'data-fetched="0"' in root[0]
    shown = without_scripts(dom)
    charts = charts_of(text)
    assert len(charts) == 11 and shown.count('class="main-svg"') >= 2 * len(charts)
    legends = re.findall(r'class="legendtext"[^>]*>([^<]*)<', shown)
    assert legends.count("first") == legends.count("second") == 9
    assert {"generate", "reward", "learn", "other"} <= set(legends)
    axes = re.findall(r'class="[xy]title[^>]*>([^<]*)<', shown)
    assert {"step", "reward", "KL (nats/token)", "custom/<x>"} <= {
        title.replace("&lt;", "<").replace("&gt;", ">") for title in axes
    }
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", shown)
