"""Codecs: algorithms that average gradients over ranks in few bytes, written without networking code."""
