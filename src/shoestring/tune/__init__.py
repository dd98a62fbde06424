"""Hyperparameter search whose trials continue on other machines after a failure; imports neither torch nor Optuna.

`settings` defines the tables of a study file, and `space` the dimensions of the search. `store` keeps trials and their
leases in one database, `worker` runs leased trials, and `process` runs one trial as a process. `search`, `gaussian` and
`population` choose the next trial and its settings.
"""

from shoestring.tune.settings import Halving, Population, Study
from shoestring.tune.space import Dimension

__all__ = ["Dimension", "Halving", "Population", "Study"]
