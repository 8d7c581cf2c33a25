"""Two families of errors, so that a caller always knows whose fault it is.

`LocalProtocolError`: this program misused the library. `RemoteProtocolError`: the peer broke the
protocol or its budget; the session with it is over, and the caller counts a strike.
"""


class ReconError(Exception):
    """Either of the two."""


class LocalProtocolError(ReconError):
    """The library was misused: a bug on this side, never the peer's doing."""


class RemoteProtocolError(ReconError):
    """The peer sent something malformed, contradictory or beyond its budget.

    `code` is a stable word for metrics and strike records.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
