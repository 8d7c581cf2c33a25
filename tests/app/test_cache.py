"""The bounded cache, against a plain list of what was used when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.cache import Recent

ITEMS_MAX, WEIGHT_MAX = 4, 20

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 6), st.integers(0, 30)),
        st.tuples(st.just("get"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 6), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_what_was_used_longest_ago_goes_first_and_the_newest_value_stays(
    done: list[tuple[str, int, int]],
) -> None:
    cache: Recent[int, int] = Recent(ITEMS_MAX, WEIGHT_MAX, int)
    kept: list[tuple[int, int]] = []  # key and value, the last used one last
    for step, key, value in done:
        there = next((each for each in kept if each[0] == key), None)
        if step == "get":
            assert cache.get(key) == (None if there is None else there[1])
        kept = [each for each in kept if each[0] != key]
        if step == "put":
            cache.put(key, value)
            kept.append((key, value))
            while len(kept) > 1 and (
                len(kept) > ITEMS_MAX or sum(each[1] for each in kept) > WEIGHT_MAX
            ):
                del kept[0]
        elif step == "drop":
            cache.drop(key)
        elif there is not None:
            kept.append(there)
        assert len(cache) == len(kept)
        assert {key for key in range(7) if key in cache} == {key for key, _ in kept}


def test_a_cleared_cache_has_room_again() -> None:
    cache: Recent[str, int] = Recent(10, 5, int)
    cache.put("a", 4)
    cache.clear()
    cache.put("b", 3)
    cache.put("c", 2)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, 3, 2)
