"""Raw records of every known schema -> samples, or reasons to reject them."""
