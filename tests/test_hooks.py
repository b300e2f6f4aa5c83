from hybridflow.core.metrics import Span
from hybridflow.core.resident import MemoryMeter
from hybridflow.hooks import describe


def test_a_record_has_documented_names_speeds_and_the_time_split() -> None:
    metrics = {"sampler/tokens": 300.0, "sampler/steps": 60.0, "actor/entropy": 0.5, "reward/mean": 1.0, "time/step_s": 2.0}
    record = describe(
        metrics, [Span("actor.update", "train", 0.0, 1.5), Span("estimator.compute", "compute", 1.5, 0.25)], MemoryMeter()
    )
    assert record.pop("memory/rss_gb") > 0 and record.pop("memory/grown_gb") >= 0
    assert record == {
        "tokens_per_s": 150.0,
        "env_steps_per_s": 30.0,
        "entropy": 0.5,
        "reward/mean": 1.0,
        "time/step_s": 2.0,
        "time/learn_s": 1.75,
    }
