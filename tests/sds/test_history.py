"""The history procedure against an oracle that knows how each element was put together."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdstore.sds.codec import parse_history
from sdstore.sds.model import HistoryEntry

Field = tuple[int, bytes | int, bool]  # number, value, whether its length is padded


def serialized(fields: Sequence[Field]) -> bytes:
    return b"".join(one_field(*field) for field in fields)


def one_field(number: int, value: bytes | int, padded: bool) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3, value])
    length = len(value)
    if padded or length > 127:
        return bytes([number << 3 | 2, length & 0x7F | 0x80, length >> 7]) + value
    return bytes([number << 3 | 2, length]) + value


def is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def last(fields: Sequence[Field], number: int) -> bytes:
    values = [value for n, value, _ in fields if n == number and isinstance(value, bytes)]
    return values[-1] if values else b""


def is_strict(fields: Sequence[Field]) -> bool:
    numbers = [number for number, _, _ in fields]
    return (
        all(isinstance(value, bytes) for _, value, _ in fields)
        and set(numbers) <= {1, 2, 3}
        and len(numbers) == len(set(numbers))
        and last(fields, 1) != b""
        and is_text(last(fields, 1))
    )


def entry_of(fields: Sequence[Field]) -> HistoryEntry:
    return HistoryEntry(last(fields, 1).decode(), last(fields, 2), last(fields, 3).decode())


def oracle(elements: Sequence[Sequence[Field]]) -> tuple[tuple[HistoryEntry, ...], bool]:
    present = [fields for fields in elements if fields]
    raw = [serialized(fields) for fields in present]
    if all(map(is_strict, present)):
        return tuple(map(entry_of, present)), False
    if all(map(is_text, raw)) and not all(element[0] == 0x0A for element in raw):
        return tuple(HistoryEntry(element.decode()) for element in raw), True
    kept = [f for f, r in zip(present, raw, strict=True) if r[0] == 0x0A and last(f, 1)]
    return tuple(map(entry_of, kept)), False


values = st.one_of(
    st.sampled_from([b"", b"a", "идент".encode(), b"\xff", b"i" * 127, b"i" * 128, b"i" * 300]),
    st.text("ab\n\x03", max_size=5).map(str.encode),
    st.integers(0, 127),
)
fields = st.tuples(st.sampled_from([1, 1, 1, 2, 3, 4]), values, st.booleans())
plain = st.tuples(st.just(1), st.sampled_from([b"a", b"i" * 128]), st.just(False))
elements = st.one_of(st.lists(plain, min_size=1, max_size=1), st.lists(fields, max_size=4))


def outcome(parse: object, argument: object) -> object:
    try:
        return parse(argument)  # type: ignore[operator]
    except UnicodeDecodeError:
        return "not UTF-8"


@given(st.lists(elements, max_size=4))
@example([[(1, b"a", False)], [(1, b"a", True)], [(1, b"a", False), (2, b"", False)]])
@example([[(1, b"", False), (4, b"", False)]])
@example([[(3, b"\xff", False), (1, b"a", False)], [(1, b"", False)]])
@settings(deadline=None, max_examples=2000)
def test_the_decision_is_the_documented_one(history: list[list[Field]]) -> None:
    raw = [serialized(fields) for fields in history]
    assert outcome(parse_history, raw) == outcome(oracle, history)
