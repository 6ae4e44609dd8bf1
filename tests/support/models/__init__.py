"""Small models and micro-batches for them."""
