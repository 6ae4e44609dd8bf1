"""The builds that a loader reads: `Build` is one, opened; `open_builds` checks that several
match.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from balance.errors import ConfigError
from loaders.read.build import StorageOptions, open_build
from loaders.read.sample_table import SampleTable, read_samples


class Build:
    """Manifest, index and shards of one build."""

    def __init__(
        self, url: str | Path, image_root: str | Path | None, options: StorageOptions
    ) -> None:
        self._stored = open_build(url, image_root=image_root, options=options)
        self.manifest, self.index, self.shards = (
            self._stored.manifest,
            self._stored.index,
            self._stored.shards,
        )

    @cached_property
    def samples(self) -> SampleTable:
        """What each sample costs; read when first asked for."""
        return read_samples(self.manifest, self.index, self._stored.files)

    def close(self) -> None:
        """Let go of files and connections."""
        self._stored.close()


def open_builds(
    urls: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    options: StorageOptions | None = None,
) -> list[Build]:
    """Open all; ConfigError unless they were made for the same model and tokens."""
    builds = [Build(url, image_root, options or StorageOptions()) for url in urls]
    first = builds[0].manifest
    for url, build in zip(urls, builds, strict=True):
        for name in ("model", "image_token_id", "audio_token_id", "vocab_size"):
            if getattr(build.manifest, name) != getattr(first, name):
                raise ConfigError(
                    f"{url} was built for another {name} than {urls[0]}; give builds of one model and tokenizer"
                )
    return builds
