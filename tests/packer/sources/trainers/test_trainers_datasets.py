"""Datasets of Energon and of MosaicML, written and read by their own code, and packed.

Each in an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/packer/sources/trainers/test_trainers_datasets.py
"""

import pytest

from support.frameworks.environments import run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("environment", "checks"),
    [("energon", "energon_source_checks.py"), ("sharding", "mds_source_checks.py")],
)
def test_what_they_write_is_packed_as_they_read_it(pytestconfig, tmp_path, environment, checks):
    run_checks(environment, f"checks/{checks}", pytestconfig, tmp_path)
