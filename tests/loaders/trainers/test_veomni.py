"""Our loaders in VeOmni's trainer, by the program of docs/load/trainers/veomni.md.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_veomni.py
"""

import pytest

from support.frameworks.environments import run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]


def test_veomni_trains_on_our_loaders_and_its_batches_are_equal(pytestconfig, tmp_path):
    run_checks("veomni", "veomni/checks.py", pytestconfig, tmp_path)
