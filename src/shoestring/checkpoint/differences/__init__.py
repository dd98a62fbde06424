"""Differential checkpoints: what each step exchanged is kept, and replayed on the newest full checkpoint."""
