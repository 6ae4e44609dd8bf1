"""NeMo Automodel with both loaders, by the code of docs/load/trainers.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_automodel.py
"""

import pytest

from support.frameworks.environments import run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]


def test_automodels_recipe_gets_its_own_batches_and_resumes(pytestconfig, tmp_path):
    run_checks("nemo_automodel", "checks/automodel_checks.py", pytestconfig, tmp_path)
