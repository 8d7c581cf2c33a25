"""The base of the errors that this library raises to its callers."""


class SdstoreError(Exception):
    """Base class of the errors of `sdstore`: of a store, a driver, a participant's file, an order, or a message.

    `code` is stable and meant for programs, `detail` for people.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
