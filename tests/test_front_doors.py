"""The commands as shells and people meet them first: versions, completion, names of models."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from isobatch.cli import COMMANDS
from isobatch.common.errors import ConfigError
from isobatch.engine.cli import app as engine_app
from isobatch.models.presets import load_model
from isobatch.packer.cli import app as packer_app

BIN = Path(sys.executable).parent


@pytest.mark.parametrize("command", ["packer", "isobatch"])
def test_a_command_says_its_version_and_completes_its_commands(command):
    said = subprocess.run([BIN / command, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == version("isobatch")
    environment = {
        **os.environ,
        f"_{command.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": f"{command} re",
        "COMP_CWORD": "1",
    }
    listed = subprocess.run(
        [BIN / command], capture_output=True, text=True, env=environment, check=False
    )
    assert set(listed.stdout.split()) >= {"report", "remove"}
    assert not listed.stderr


def test_isobatch_has_all_commands_of_both_programs():
    for package, program in (("packer", packer_app), ("engine", engine_app)):
        names = {of.name or of.callback.__name__ for of in program.registered_commands}
        assert names <= {name for where, name, _ in COMMANDS.values() if where == package}


def test_a_model_may_be_named_with_the_size_that_it_has():
    assert load_model("qwen2_5_vl_7b") == load_model("qwen2_5_vl")
    assert load_model("smolvlm2_500m") == load_model("smolvlm2")
    for wrong in ("qwen2_5_vl_8b", "tiny_", "qwen2_5_vl_"):
        with pytest.raises(ConfigError, match="no model preset"):
            load_model(wrong)
