"""Names of facts and of a table that the report and `shoestring plan --explain` read."""

CHOSEN = "chosen bits: "
"""Prefix of facts: name of a group of operators -> the bits that measured errors have chosen for it."""
CHOSEN_TITLE = "Bits that measured errors have chosen"
"""Title of the report's table of these groups."""
