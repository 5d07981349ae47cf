"""Drafters, made once."""

import pytest

from tests.helpers.exported import Drafters, make_drafters


@pytest.fixture(scope="session")
def drafters(tmp_path_factory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), "driven")
