"""Plans that other trainers can follow, and the settings with which they do."""
