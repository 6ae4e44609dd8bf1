"""Videos in a model's folder: rule and markup."""
