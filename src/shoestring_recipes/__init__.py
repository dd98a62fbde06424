"""Recipes: ready-made run files that test shoestring's features on real tasks.

A recipe is a subfolder of this package with a `run.toml`. `shoestring.run.recipes` lists these subfolders, so
`shoestring train NAME` needs only a new subfolder.
"""
