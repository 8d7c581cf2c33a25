"""FarmHash Fingerprint64, the string hash of Nim 2.2 and so of nim-sds's bloom filters.

Google published the function as `farmhashna::Hash64` (github.com/google/farmhash) and froze it.
"""

_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_U64 = 0xFFFF_FFFF_FFFF_FFFF

_State = tuple[int, int, int, int, int, int, int]


def fingerprint64(data: bytes) -> int:
    """The hash of `data`, an unsigned 64-bit integer."""
    size = len(data)
    if size <= 16:
        return _up_to_16(data, size)
    if size > 64:
        return _above_64(data, size)
    mul = _K2 + size * 2
    a = _word(data, 0) * (_K1 if size <= 32 else _K2)
    b = _word(data, 8)
    c = _word(data, size - 8) * mul
    d = _word(data, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, mul)
    if size <= 32:
        return z
    e, f = _word(data, 16) * mul, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * mul, (z + _word(data, size - 24)) * mul
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _up_to_16(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    if size >= 8:
        a, b = _word(data, 0) + _K2, _word(data, size - 8)
        return _mix(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if size >= 4:
        first, last = int.from_bytes(data[:4], "little"), int.from_bytes(data[-4:], "little")
        return _mix(size + (first << 3), last, mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _U64
    return _K2


def _above_64(data: bytes, size: int) -> int:
    seed = 81
    x = seed * _K2 + _word(data, 0)
    y = seed * _K1 + 113
    state = (x, y, _shift_mix(y * _K2 + 113) * _K2, 0, 0, 0, 0)
    tail = (size - 1) & 63
    for at in range(0, size - 1 - tail, 64):
        state = _block(data, at, state, _K1, 1)
    x, y, z, v0, v1, w0, w1 = state
    w0 += tail
    v0 += w0
    w0 += v0
    mul = _K1 + ((z & 0xFF) << 1)
    # The last block is the last 64 bytes, which overlap the block before.
    x, y, z, v0, v1, w0, w1 = _block(data, size - 64, (x, y, z, v0, v1, w0, w1), mul, 9)
    return _mix(
        _mix(v0, w0, mul) + _shift_mix(y) * _K0 + z,
        _mix(v1, w1, mul) + x,
        mul,
    )


def _block(data: bytes, at: int, state: _State, mul: int, factor: int) -> _State:
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + _word(data, at + 8), 37) * mul
    y = _rotate(y + v1 + _word(data, at + 48), 42) * mul
    x = (x ^ w1 * factor) & _U64
    y = (y + v0 * factor + _word(data, at + 40)) & _U64
    z = _rotate(z + w0, 33) * mul & _U64
    v0, v1 = _weak(data, at, v1 * mul, x + w0)
    w0, w1 = _weak(data, at + 32, z + w1, y + _word(data, at + 16))
    return z, y, x, v0, v1, w0, w1


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    last = _word(data, at + 24)
    a += _word(data, at)
    b = _rotate(b + a + last, 21)
    c = a
    a += _word(data, at + 8) + _word(data, at + 16)
    return (a + last) & _U64, (b + _rotate(a, 44) + c) & _U64


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _rotate(value: int, bits: int) -> int:
    value &= _U64
    return (value >> bits | value << (64 - bits)) & _U64


def _shift_mix(value: int) -> int:
    value &= _U64
    return value ^ value >> 47


def _mix(u: int, v: int, mul: int) -> int:
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix((v ^ a) * mul) * mul & _U64
