"""Recipes: run files that prove the features on real work.

A recipe is a folder here with a `run.toml`; `shoestring.run.recipes` lists them, so a new folder is all that
`shoestring train NAME` needs.
"""
