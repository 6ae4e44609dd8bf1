"""The loader in torch's DataLoader and in transformers' Trainer."""
