"""Writes the page of a study: `charts` draws the charts, and `importance` estimates which settings matter."""
