"""Worker processes of a loader without a build."""
