"""Text to tokens: tokenizer, chat template, placeholders for media."""
