"""The base of the errors that this library raises to its callers."""


class SdstoreError(Exception):
    """Base class of the errors of `sdstore`: of a store, a driver, a participant's file, an order, or a message."""
