"""Loading without a build: datasets are measured and packed while training runs."""
