"""Training: data, features, the trainer, evaluation. Nothing is imported here."""
