"""Arguments of the verbs, and the printing of their results; importing these modules does not import torch.

The class of a verb is in the module of the things that the verb works on: `runs` (runs, recipes, keys, the cluster),
`models` (trained models), `data` (training data), `checkpoint` (checkpoints of a run), `recordings` (profiles and
recordings of memory), `tune` (studies), `lab` (virtual hosts). `table` lists all verbs, `shared` has arguments of
several modules, `printing` prints results as text or JSON, and `terminal` is the dialogue of `chat`.
"""
