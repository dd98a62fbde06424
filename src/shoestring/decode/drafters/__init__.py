"""What proposes tokens for a model to verify."""
