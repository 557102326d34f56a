"""Measure the rates of the machine once, and keep them outside of the user's cache."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
