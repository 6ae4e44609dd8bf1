"""Loading without a build where each rank packs what it has loaded itself."""
