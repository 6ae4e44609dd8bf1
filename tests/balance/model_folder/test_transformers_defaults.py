"""What the readers assume is what the installed transformers assumes."""

import runpy

from support import ROOT


def test_the_defaults_are_those_of_transformers() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_transformers_defaults.py"))
    shipped = (ROOT / "configs" / "transformers_defaults.toml").read_text("utf-8")
    assert script["toml_text"]() == shipped
