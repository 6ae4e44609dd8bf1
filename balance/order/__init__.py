"""Orders of groups: sorted for a build, random per epoch, even among ranks."""
