from hybridflow.core.metrics import Metrics


def test_means_weigh_the_parts() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.add("loss", 6.0, 3)
    other.add("loss", 4.0, 1)
    other.add("empty", 0.0, 0)
    metrics.merge(other)
    assert metrics.means() == {"loss": 2.5}


def test_merge_prefixes_names() -> None:
    metrics, other = Metrics(), Metrics()
    other.add("loss", 1.0)
    metrics.merge(other, prefix="actor/")
    assert metrics.means() == {"actor/loss": 1.0}
    metrics.clear()
    assert metrics.means() == {}
