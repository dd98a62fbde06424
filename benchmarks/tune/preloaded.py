"""What the process that workers are forked from has imported."""

import numpy  # noqa: F401
import optuna  # noqa: F401
import psycopg  # noqa: F401
import scipy.optimize
import scipy.stats  # noqa: F401

import shoestring.tune.search
import shoestring.tune.worker  # noqa: F401
