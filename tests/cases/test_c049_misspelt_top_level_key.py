"""C049: a misspelt top-level key is an error with the nearest key, and private keys have a documented form."""

from __future__ import annotations

import json

import pytest

from trilithon.config import Config
from trilithon.errors import ConfigError


@pytest.mark.parametrize("rest", [{}, {"train_batch_size": 8}, {"train_batch_size": 8, "fp16": {"enabled": True}}])
def test_a_misspelt_deepspeed_key_is_refused_with_the_nearest(rest, tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"gradient_clipp1ng": 1.0, **rest}))
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert f"{file}: gradient_clipp1ng: unknown key; did you mean gradient_clipping?" in str(caught.value)


def test_a_misspelt_native_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"clip_n0rm: unknown key; did you mean clip_norm\?"):
        Config.load({"clip_n0rm": 1.0})


@pytest.mark.parametrize("block", [{"clip_norm": 1.0}, {"gradient_clipping": 1.0, "train_batch_size": 8}])
def test_private_keys_begin_with_an_underscore(block):
    config = Config.load({**block, "_gradient_clipp1ng": {"anything": [1, None]}})
    assert config.private == {"_gradient_clipp1ng": {"anything": [1, None]}}
    assert config.clip_norm == 1.0
