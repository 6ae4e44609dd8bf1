"""Places in texts: marks of files, and boxes of objects in images."""
