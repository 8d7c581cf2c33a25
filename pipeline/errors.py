"""Errors of the snapshot verbs. `code` is stable and meant for programs."""

from __future__ import annotations

from typing import ClassVar


class PipelineError(Exception):
    """Base class; the text says what happened."""

    code: ClassVar[str] = "pipeline_failed"


class ManifestError(PipelineError):
    """The folder is not a snapshot, its manifest is damaged or of an unknown version, or a file cannot
    be read."""

    code = "damaged_snapshot"


class ParentMismatchError(PipelineError):
    """The parent is a snapshot of another store, of other channels, or of a lost history."""

    code = "parent_mismatch"


class PublishError(PipelineError):
    """The folder exists already, or another process is making it."""

    code = "target_not_free"


class DatabaseError(PipelineError):
    """The URL leads to no store that this software can read."""

    code = "not_found"


class OrderError(PipelineError):
    """The channel cannot be ordered: too many messages wait for missing ones."""

    code = "order_too_large"


class ChannelError(PipelineError):
    """The snapshot has no such channel."""

    code = "not_found"


class SparkStartError(PipelineError):
    """Spark did not start; the text ends with Spark's output."""

    code = "spark_failed"
