"""The rates of the machine are measured once, and not where the user keeps theirs."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
