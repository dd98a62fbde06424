"""Names of trace facts and of a report table, read by the report and by `shoestring plan --explain`."""

CHOSEN = "chosen bits: "
"""Prefix of the facts that map a group of operators to the number of bits chosen from measured errors."""
CHOSEN_TITLE = "Bits that measured errors have chosen"
"""Title of the report's table of these groups."""
