"""Writes the page of a profile: one HTML file that works offline."""
