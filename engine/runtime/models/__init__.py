"""Models of transformers as layer stacks that a pipeline can cut anywhere."""
