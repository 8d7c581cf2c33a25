"""The pool of our own in which the generated modules register their messages (`tools/proto.py`)."""

from google.protobuf.descriptor_pool import DescriptorPool

_POOL = DescriptorPool()


def Default() -> DescriptorPool:  # noqa: N802 - as protobuf's module has it
    """The pool of all modules here."""
    return _POOL
