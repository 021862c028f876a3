"""A deployment on one machine: what its nodes are told."""

from tapfl.config import Config
from tapfl.deploy.local import _earlier


def test_where_nodes_go_on(tmp_path):
    """Each in its own earlier folder, or where everything was in one process."""
    assert _earlier(Config(), ["a"]) == []
    config = Config(start=str(tmp_path))
    assert _earlier(config, ["a"]) == ["--set", f"start={tmp_path}"]
    own = tmp_path / "deploy" / "nodes" / "b"
    own.mkdir(parents=True)
    assert _earlier(config, ["a", "b"]) == ["--set", f"start={own}"]
    assert _earlier(config, ["c"]) == ["--set", "start=new"]
