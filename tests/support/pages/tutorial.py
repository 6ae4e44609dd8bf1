"""Follows the blocks of a page in a folder: saves files, runs commands.

A shell reads the commands; they run in processes that are forked, which have imported already what
takes seconds.
"""

import json
from pathlib import Path

from support import ROOT
from support.pages.blocks import Block, blocks_of, commands_of
from support.ranks import launch

IN_FOLDER = Path(__file__).parent / "in_folder.py"


class Tutorial:
    """Blocks of pages and the folder in which they are followed."""

    def __init__(self, blocks: list[Block], folder: Path, **variables: str) -> None:
        self.blocks, self.folder, self.variables = blocks, folder, variables
        self.said: list[str] = []
        """What each command printed, in order."""

    def follow(self) -> str:
        """Save the files and run the commands, as the page says; -> all that was printed."""
        for block in self.blocks:
            kind, _, value = block.mark.partition(": ")
            if kind == "file":
                (self.folder / value).write_text(block.code)
            elif block.language == "bash" and kind != "yours":
                status = int(value) if kind == "status" else 0
                for words in commands_of(block.code, self.folder, self.variables):
                    self._run(words, status, block.place)
            else:
                assert block.language in ("", "bash"), f"{block.place} is neither saved nor run"
        return "\n".join(self.said)

    def _run(self, words: list[str], status: int, place: str) -> None:
        ranks = 1
        if words[0] == "torchrun":
            ranks = int(words[2])
            words = ["python", *words[3:]]
        if words[0] == "packer":
            words = ["python", "-m", *words]
        assert words[0] == "python", f"{place}: {words[0]}"
        words = words[2:] if words[1] == "-m" else words[1:]
        said = self.folder.parent / f"said{len(self.said)}"
        done = launch(ranks, said, IN_FOLDER, self.folder, json.dumps(self.variables), *words)
        assert done.returncode == status, f"{place}: {words}\n{done.stdout}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, done.stderr
        self.said.append(done.stdout + done.stderr)


def tutorial(name: str, folder: Path, **variables: str) -> Tutorial:
    """A page of docs/tutorials."""
    return Tutorial(blocks_of(ROOT / "docs" / "tutorials" / f"{name}.md"), folder, **variables)
