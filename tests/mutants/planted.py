"""All faults by name, and how a process plants one in itself."""

from __future__ import annotations

import importlib
import os

from tests.mutants.fault import ENVIRONMENT, Fault

AREAS = (
    "access",
    "backfill",
    "driver",
    "federation",
    "file",
    "mvds",
    "ordering",
    "orders",
    "participant",
    "peers",
    "policy",
    "recon",
    "relay",
    "schedule",
    "sds",
    "store",
    "sync",
)  # modules beside this one, each with its FAULTS


def faults_of(area: str) -> list[Fault]:
    """The faults of one area; their names begin with it."""
    faults: list[Fault] = importlib.import_module(f"tests.mutants.{area}").FAULTS
    return faults


def all_faults() -> list[Fault]:
    """All faults, in the order of their areas."""
    return [fault for area in AREAS for fault in faults_of(area)]


def plant_from_environment() -> None:
    """Plant the fault that the environment names, if any."""
    if wanted := os.environ.get(ENVIRONMENT):
        [fault] = [each for each in faults_of(wanted.partition(":")[0]) if each.name == wanted]
        fault.plant_on_import()
