"""Evaluates models on tasks of lm-evaluation-harness (package `lm_eval`), during training and afterwards."""
