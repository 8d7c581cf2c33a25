"""Why a snapshot verb could not do its work. `code` is stable and meant for programs."""

from __future__ import annotations

from typing import ClassVar


class PipelineError(Exception):
    """The family; the text says what happened."""

    code: ClassVar[str] = "pipeline_failed"


class ManifestError(PipelineError):
    """The folder is not a snapshot, or its manifest is damaged or of an unknown version."""

    code = "damaged_snapshot"


class ParentMismatchError(PipelineError):
    """The parent is a snapshot of another store, of other channels, or of a history that is gone."""

    code = "parent_mismatch"


class PublishError(PipelineError):
    """The folder cannot be made: it is there already, or somebody else is making it."""

    code = "target_not_free"


class DatabaseError(PipelineError):
    """There is no store at the URL that this software can read."""

    code = "not_found"


class SparkStartError(PipelineError):
    """Spark did not start; the text ends with what it wrote."""

    code = "spark_failed"
