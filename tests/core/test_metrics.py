from hybridflow.core.metrics import Metrics


def test_means_weigh_the_parts() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.add("loss", 6.0, 3)
    other.add("loss", 4.0, 1)
    other.add("empty", 0.0, 0)
    metrics.merge(other)
    assert metrics.values() == {"loss": 2.5}


def test_merge_prefixes_names() -> None:
    metrics, other = Metrics(), Metrics()
    other.add("loss", 1.0)
    metrics.merge(other, prefix="actor/")
    assert metrics.values() == {"actor/loss": 1.0}
    metrics.clear()
    assert metrics.values() == {}


def test_counts_add_up_and_maxima_stay() -> None:
    metrics, other = Metrics(), Metrics()
    for part, tokens, gap in ((metrics, 3, -2.0), (other, 4, -1.0), (other, 5, -3.0)):
        part.count("tokens", tokens)
        part.maximum("gap", gap)
    metrics.merge(other)
    assert metrics.values() == {"tokens": 12.0, "gap": -1.0}
    metrics.merge(other, prefix="b/")
    assert metrics.values() == {"tokens": 12.0, "gap": -1.0, "b/tokens": 9.0, "b/gap": -1.0}
