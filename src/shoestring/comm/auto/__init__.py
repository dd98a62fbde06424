"""The choice among exchanges by their measured cost."""
