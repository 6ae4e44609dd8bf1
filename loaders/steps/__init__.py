"""What each step holds, computed without torch and without reading a shard."""
