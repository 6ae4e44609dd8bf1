"""Raw data and builds, made or checked by means of their own."""
