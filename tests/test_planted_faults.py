"""The planted faults of `make mutants` fit the code: each seam exists, and its wrong value can be made."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from tests.mutants.__main__ import EVERYWHERE, ROOT
from tests.mutants.fault import ENVIRONMENT, Fault, instead
from tests.mutants.planted import all_faults

_FAULTS = all_faults()


@pytest.mark.parametrize("fault", _FAULTS, ids=[fault.name for fault in _FAULTS])
def test_the_seam_of_a_fault_exists_and_its_tests_too(fault: Fault) -> None:
    right = fault.seam_in(importlib.import_module(fault.module))[2]
    assert fault.wrong_value() is not right
    for test in fault.tests:
        assert (ROOT / test.partition("::")[0]).exists()


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in _FAULTS]
    assert len(set(names)) == len(names)


def test_a_seam_that_is_gone_does_not_fit() -> None:
    for seam in ("recon.errors:ReconError.gone", "recon.errors:gone", "recon.errors:gone.method"):
        with pytest.raises(LookupError, match="no seam"):
            Fault("gone", seam, instead(None), ()).wrong_value()
    with pytest.raises(ImportError):
        Fault("gone", "recon.gone:seam", instead(None), ()).wrong_value()


def test_a_fault_is_planted_before_others_import_the_seam_by_name() -> None:
    """`sdstore.sds` imports the constant from its module, and is imported before it."""
    program = "import sdstore.sds; print(sdstore.sds.LAMPORT_MIN)"
    folders = os.pathsep.join([str(ROOT), str(EVERYWHERE)])
    for fault, printed in (("", -(2**31)), ("sds: timestamps below int32 are taken", -(2**32))):
        environment = {**os.environ, "PYTHONPATH": folders, ENVIRONMENT: fault}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        assert int(ended.stdout) == printed
