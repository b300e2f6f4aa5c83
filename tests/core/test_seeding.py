import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.seeding import derive, generator, torch_generator, uniforms


def test_derive_depends_on_every_part() -> None:
    seeds = [derive(1, "a"), derive(2, "a"), derive(1, "b"), derive(1, "a", 0), derive(1, "a", 1), derive(1, "a", 0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert derive(1, "a", 3) == derive(1, "a", 3)


def test_generators_repeat() -> None:
    assert generator(1, "x", 2).random(4).tolist() == generator(1, "x", 2).random(4).tolist()
    assert torch_generator(1, "x").initial_seed() != torch_generator(1, "y").initial_seed()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20), st.integers(0, 10_000))
def test_uniforms_do_not_depend_on_the_batch(ids: list[int], position: int) -> None:
    together = uniforms(1, "sample", ids, [position] * len(ids))
    alone = [uniforms(1, "sample", [i], [position])[0] for i in ids]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    ids, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    values = uniforms(3, "sample", ids.ravel(), positions.ravel()).reshape(300, 300)
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    expected = values.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 45  # 99.9 % quantile of chi-square with 19 degrees: 43.8
    for other in (np.roll(values, 1, axis=0), np.roll(values, 1, axis=1)):
        assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.02
