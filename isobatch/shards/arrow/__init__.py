"""Messages of Arrow IPC, read without pyarrow."""
