"""Two families of errors: this program misused the library, or the peer broke the protocol."""


class ReconError(Exception):
    """Base class of both errors."""


class LocalProtocolError(ReconError):
    """This program misused the library; a peer cannot cause it."""


class RemoteProtocolError(ReconError):
    """The peer sent something malformed or contradictory, or exceeded a budget.

    The session with it is over. `code` is a stable word for metrics and reports.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
