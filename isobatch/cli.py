"""The `isobatch` command: all of `packer` and `python -m engine`, with one help."""

import sys
from importlib import import_module

from isobatch.common.command_line import new_app, run_app

COMMANDS = {
    "pack": ("packer", "build", "Pack a dataset into balanced micro-batches (packer build)."),
    "add": ("packer", "add", "Add data to a finished build."),
    "merge": ("packer", "merge", "Make one build of several."),
    "remove": ("packer", "remove", "Take samples out of a build, and out of every file of it."),
    "push": ("packer", "push", "Upload a finished build to the Hugging Face Hub."),
    "report": ("packer", "report", "Show how balanced a build is."),
    "verify": ("packer", "verify", "Check that a build is what was written."),
    "inspect": ("packer", "inspect", "Show one group of a build: text, labels and images."),
    "count": ("packer", "count", "Count what samples cost, without writing a build."),
    "group": ("packer", "group", "Group samples of given lengths."),
    "cache": ("packer", "cache", "Show, or remove, what is kept for later runs."),
    "datasets": ("packer", "datasets", "List the known datasets and what each needs."),
    "models": ("packer", "models", "List the presets of models."),
    "plan": ("engine", "plan", "Plan a training run: partition, recomputation, schedule."),
    "simulate": ("engine", "simulate", "Simulate a plan's steps."),
    "train": ("engine", "train", "Train a model as a pipeline, by a plan. Under torchrun."),
    "measure": ("engine", "measure", "Plan from measurements on the ranks that will train."),
}
"""Command -> package, its name there, help."""

app = new_app(
    "isobatch",
    "Every GPU of a vision-language-model training run does the same amount of work.\n\n"
    "Try it: isobatch pack --dataset demo --out demo-packed",
)


def _list(name: str, text: str) -> None:
    """Register a command for the help; `main` runs it in its own package."""
    app.command(name, help=text)(lambda: None)


for _name, (_, _, _text) in COMMANDS.items():
    _list(_name, _text)


def main() -> None:
    """Run the call in `sys.argv`."""
    package, command, _ = COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else "", ("", "", ""))
    if package:
        sys.argv[1] = command
        import_module(f"isobatch.{package}.cli").main()
    else:
        run_app(app, "isobatch")
