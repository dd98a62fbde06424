"""Recipes: run files that prove the features on real work."""
