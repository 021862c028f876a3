import pytest

from tests.engine.stores import Gate


@pytest.fixture
def gate(monkeypatch):
    door = Gate(monkeypatch)
    yield door
    door.error = None
    door.open.set()
