"""Search for the settings of a run: trials that survive the machines they run on. Free of torch and of Optuna.

`settings` is the study file, `space` its dimensions; `store` keeps trials and their leases in one database, `worker`
runs a leased trial, `process` is a trial as a process, `search`, `gaussian` and `population`
choose what runs next.
"""

from shoestring.tune.settings import Halving, Population, Study
from shoestring.tune.space import Dimension

__all__ = ["Dimension", "Halving", "Population", "Study"]
