"""What `benchmarks/online_training.py` trains with: records, a model, each method's batches."""
