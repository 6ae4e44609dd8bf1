"""The errors of Isobatch that a caller may want to catch.

IsobatchError
├── DataError          the raw data or an artefact of ours cannot be used
│   └── DamagedShard   a shard is not what its manifest says
└── ConfigError        a preset, a configuration or an option is wrong
"""


class IsobatchError(Exception):
    """Root of all errors raised on purpose; its text is one line for the user: what, where, what to do."""


class DataError(IsobatchError):
    """The raw data or an artefact of ours cannot be used."""


class DamagedShard(DataError):
    """A shard is missing, has another size or another checksum than its manifest says."""


class ConfigError(IsobatchError, ValueError):
    """A preset, a configuration or an option is wrong."""
