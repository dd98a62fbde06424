"""Finds the newest usable checkpoint of a run, and resumes from it."""
