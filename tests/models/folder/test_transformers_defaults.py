"""What the readers assume is what the installed transformers assumes."""

import runpy

from support import ROOT


def test_the_defaults_are_those_of_transformers() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_transformers_defaults.py"))
    shipped = (ROOT / "configs" / "transformers_defaults.toml").read_text("utf-8")
    made_by, _, found = script["toml_text"]().partition("\n")
    # a newer version that assumes the same is no reason to write the file again
    assert found == shipped.partition("\n")[2], made_by
