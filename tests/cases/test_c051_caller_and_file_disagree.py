"""C051: all mismatches between caller arguments and file come as one error; a leftover "auto" is named."""

from __future__ import annotations

import pytest

from trilithon.config import Config
from trilithon.errors import ConfigError

FILE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2},
}
CALLER = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 2e-3,
    "gradient_accumulation_steps": 4,
}


def test_four_mismatches_and_a_leftover_auto_are_one_error():
    with pytest.raises(ConfigError) as caught:
        Config.load(FILE, expected=CALLER)
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 problems in the configuration:"
    mismatched = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer.params.lr"}
    for key in mismatched:
        (line,) = (line for line in lines if f": {key}=" in line)
        assert repr(CALLER[key]) in line
    assert 'optimizer.params.weight_decay="auto"' in lines[-1]


def test_auto_everywhere_lets_the_caller_decide():
    file = {
        **dict.fromkeys(FILE, "auto"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2},
    }
    config = Config.load(file, expected=CALLER, auto={"optimizer.params.weight_decay": 0.1})
    assert config.batch.resolve(2).accumulation == 4
    assert (config.clip_norm, config.optimizer.lr, config.optimizer.weight_decay) == (1.0, 2e-3, 0.1)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_leftover_auto_never_reaches_arithmetic(key):
    file = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, key: "auto"}
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert str(caught.value).startswith(f'config: {key}="auto": nothing supplies its value')
    with pytest.raises(ConfigError, match='="auto"'):
        Config.load(file, auto={key: "auto"})
