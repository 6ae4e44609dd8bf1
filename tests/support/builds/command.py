"""The command `packer`, as a person runs it."""

import sys

from isobatch.packer.cli import main


def run_packer(capsys, monkeypatch, *arguments):
    """Run the command in this process; -> (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["packer", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as leave:
        status = leave.code or 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err
