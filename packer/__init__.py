"""Offline: raw data -> counts -> balanced groups -> shards. `packer.cli` is the command;
`packer.build` the stages.
"""
