"""Dataset descriptions of other trainers: what their own files say of the data."""
