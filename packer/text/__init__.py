"""Text to tokens: the tokenizer, its chat template, and placeholders for images and audio."""
