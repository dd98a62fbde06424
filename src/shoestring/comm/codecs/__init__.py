"""Codecs: the average of gradients over ranks, written without the network."""
