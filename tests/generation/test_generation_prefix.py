import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.generation.prefix import BLOCK, Match, PrefixIndex, digests


def test_only_whole_blocks_before_the_last_token_have_a_digest():
    counts = [len(digests(np.arange(length))) for length in (1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)]
    assert counts == [0, 0, 1, 1, 2]


def test_a_digest_knows_all_that_comes_before():
    base, changed = np.arange(4 * BLOCK), np.arange(4 * BLOCK)
    changed[BLOCK + 3] += 1
    assert [a == b for a, b in zip(digests(base), digests(changed), strict=True)] == [True, False, False]
    repeated = digests(np.zeros(4 * BLOCK, np.int64))
    assert len(set(repeated)) == 3


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=4).flatmap(
    lambda blocks: st.integers(0, BLOCK).map(lambda tail: np.array([b for b in blocks for _ in range(BLOCK)] + [1] * tail))
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sequences, sequences)
def test_digests_are_equal_where_prefixes_are_and_nowhere_else(left, right):
    for i, mine in enumerate(digests(left)):
        for j, theirs in enumerate(digests(right)):
            equal = np.array_equal(left[: (i + 1) * BLOCK], right[: (j + 1) * BLOCK])
            assert (mine == theirs) == equal


def test_what_was_added_in_this_step_is_fresh_until_it_is_settled():
    index, known = PrefixIndex(), digests(np.arange(3 * BLOCK))
    index.add("old", known[:1])
    index.settle()
    index.add("new", known)
    assert index.find(known) == Match("new", 2 * BLOCK, True)
    assert index.find(known[:1]) == Match("old", BLOCK, False)  # one that is there goes before a fresh one
    index.settle()
    assert index.find(known) == Match("new", 2 * BLOCK, False)
    index.remove("new")
    assert index.find(known) == Match("old", BLOCK, False)
    index.remove("old")
    index.remove("never there")
    assert index.find(known) is None and index.find([]) is None


PROMPTS = [np.array([int(bit) for bit in f"{number:03b}" for _ in range(BLOCK)] + [9]) for number in range(8)]
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("settle"), st.just(0)),
)


def common(left, right):
    """Tokens that two prompts have in common from the start."""
    differ = np.flatnonzero(left != right)
    return int(differ[0]) if len(differ) else len(left)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(EVENTS, max_size=25))
def test_the_longest_known_prefix_is_found(events):
    index, owned, fresh, count = PrefixIndex(), {}, set(), 0
    for kind, value in events:
        if kind == "add":
            index.add(count, digests(PROMPTS[value]))
            owned[count] = PROMPTS[value]
            fresh.add(count)
            count += 1
        elif kind == "remove":
            index.remove(value)
            owned.pop(value, None)
            fresh.discard(value)
        else:
            index.settle()
            fresh.clear()
        for prompt in PROMPTS:
            shares = {owner: common(prompt, tokens) // BLOCK * BLOCK for owner, tokens in owned.items()}
            longest = max(shares.values(), default=0)
            candidates = {owner for owner, share in shares.items() if share == longest}
            match = index.find(digests(prompt))
            if longest == 0:
                assert match is None
            else:
                assert match is not None and match.length == longest and match.owner in candidates
                assert match.fresh == (match.owner in fresh) == (candidates <= fresh)
