"""Low-rank adapters (LoRA, DoRA) for the frozen layers of a model."""
