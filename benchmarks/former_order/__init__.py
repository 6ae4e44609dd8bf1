"""The loaders' order before version 0.2, to compare with: sorted groups in random blocks."""
