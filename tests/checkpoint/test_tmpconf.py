from shoestring.testing import FeatureSuite
from shoestring.checkpoint import Tiered
import logging
class TestTiered(FeatureSuite):
    feature = Tiered(memory_every=2, disk_every=4)
    returns_model = True
