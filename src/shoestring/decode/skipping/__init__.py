"""Sublayer skipping: generation without some of a model's attention and feed-forward sublayers.

- `importance.py` measures how much each sublayer changes the residual stream, over sample text or during generation.
- `cost.py` counts the bytes that each sublayer moves for one token at a given context length.
- `choice.py` chooses the sublayers to skip: the least harmful sublayers that save the requested bytes.
- `baselines.py` holds published rules for the same choice.
"""
