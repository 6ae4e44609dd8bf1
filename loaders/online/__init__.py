"""Loading without a build: datasets are measured, packed and balanced while training runs."""
