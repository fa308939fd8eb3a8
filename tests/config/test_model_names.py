"""A model that was given no name answers to those that people know it by."""

from pathlib import Path

import pytest

from quire.config.model_names import names_of_model

HUB = Path("/cache/models--org--small/snapshots/0123")


@pytest.mark.parametrize(
    ("model", "path", "hf_config", "names"),
    [
        ("embedded", Path("/x"), {}, ("quire-embedded", "embedded")),
        ("/srv/models/small", Path("/srv/models/small"), {}, ("/srv/models/small", "small")),
        ("org/small", HUB, {}, ("org/small", "small")),
        (str(HUB), HUB, {}, (str(HUB), "0123", "org/small")),
        ("./small/", Path("/small"), {"_name_or_path": "org/small"}, ("./small/", "small", "org/small")),
        ("small", Path("/small"), {"_name_or_path": "/home/somebody/small"}, ("small",)),
    ],
)
def test_names(model, path, hf_config, names):
    assert names_of_model(model, path, hf_config) == names
