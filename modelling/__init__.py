"""What a model is made of before it exists: its config, and the loss of its head."""
