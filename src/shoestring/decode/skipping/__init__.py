"""Sublayer skipping: which attention and feed-forward sublayers a model does without, at what cost in quality.

importance.py   how much each sublayer changes the residual stream, over sample text or while text is generated
cost.py         the bytes that each sublayer moves for one token at a length of context
choice.py       which sublayers to skip: the least change for the bytes wanted
baselines.py    published rules for the same question
"""
