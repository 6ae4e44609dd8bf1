"""A build in partitions: cut, packed one by one on any machine, joined."""
