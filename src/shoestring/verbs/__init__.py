"""What each verb of the command line does, as functions: `from shoestring.verbs.quantize import quantize`.

`shoestring.cli.VERBS` lists the verbs. The functions return what the command line prints.
"""
