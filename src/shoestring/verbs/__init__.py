"""Functions that do what the verbs of the command line do: `from shoestring.verbs.quantize import quantize`.

`shoestring.cli.VERBS` lists the verbs. The functions return the text or the results that the command line prints.
"""
