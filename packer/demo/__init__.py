"""The built-in demo dataset and its tokenizer."""
