"""Runs codecs between the ranks of a job: threads, collectives, and hooks."""
