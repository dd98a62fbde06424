"""Functions that do what the verbs of the command line do: `from shoestring.verbs.quantize import quantize`.

`shoestring.commands.table` lists the verbs. The functions return the text or the results that the command line prints.
"""
