"""Orders of groups: sorted for a build, random for an epoch, even among the ranks of a step."""
