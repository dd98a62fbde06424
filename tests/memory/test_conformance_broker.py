"""The broker of host memory under the conformance suite."""

from typing import ClassVar

import pytest

from shoestring.checkpoint import Tiered
from shoestring.memory import Broker
from shoestring.testing import FeatureSuite


class TestBroker(FeatureSuite):
    feature = Broker(tenant="conformance")
    partners: ClassVar = (Tiered(),)  # the one that leases memory


@pytest.mark.slow
class TestBrokerWithAll(FeatureSuite):
    feature = Broker(tenant="conformance", all_users=True, folder="/tmp")
