"""Models that the built-in jobs train, text generation, weights interchange with Hugging Face. Import the modules."""
