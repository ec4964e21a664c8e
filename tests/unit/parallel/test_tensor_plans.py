"""Which layers are cut how: by name, by the model's own plan, by the user's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trilithon.errors import ConfigError
from trilithon.models import GPT, Bert, BertConfig, GPTConfig, Llama, LlamaConfig
from trilithon.parallel.tensor import make_plan
from trilithon.parallel.tensor.plan import find_steps
from trilithon.testing.models import TinyGPT

MODELS = {
    "gpt": lambda: GPT(GPTConfig(vocab_size=61, context=8, num_layers=2, width=32, num_heads=4, activation="swiglu")),
    "llama": lambda: Llama(
        LlamaConfig(vocab_size=61, context=8, num_layers=2, width=32, num_heads=4, num_kv_heads=2, inner_width=48)
    ),
    "bert": lambda: Bert(BertConfig(vocab_size=61, context=8, num_layers=2, width=32, num_heads=4, inner_width=64)),
}


def styles(steps):
    return {step.name: (step.style, step.blocks) for step in steps if step.style != "tokens"}


@pytest.mark.parametrize("kind", MODELS)
def test_names_alone_give_the_plan_that_the_model_declares(kind):
    model = MODELS[kind]()
    assert styles(find_steps(model)) == styles(make_plan(model).steps)


class Attention(nn.Module):
    """Fused matrix with fewer heads of keys, as Phi-3 has it, and norms of single heads, as Qwen3 has them."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 2
        self.qkv_proj, self.o_proj = nn.Linear(32, 64), nn.Linear(32, 32)
        self.q_norm = nn.RMSNorm(8)


class GPTJBlock(nn.Module):
    """Bloom's and BERT's habit: everything is called dense, and what is around it says what it is."""

    def __init__(self):
        super().__init__()
        self.self_attention, self.mlp, self.attn = nn.Module(), nn.Module(), Attention()
        self.self_attention.query_key_value, self.self_attention.dense = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp.dense_h_to_4h, self.mlp.dense_4h_to_h = nn.Linear(16, 64), nn.Linear(64, 16)
        self.experts = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})])


def test_layers_are_told_apart_by_what_is_around_them_and_by_width():
    assert styles(find_steps(GPTJBlock())) == {
        "self_attention.query_key_value": ("column", ()),  # its heads lie one after the other
        "self_attention.dense": ("row", ()),
        "mlp.dense_h_to_4h": ("column", ()),
        "mlp.dense_4h_to_h": ("row", ()),
        "attn.qkv_proj": ("column", (32, 16, 16)),
        "attn.o_proj": ("row", ()),
        "attn.q_norm": ("summed", ()),
    }


def test_a_product_without_its_partner_stays_whole():
    class Lonely(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(16, 8)  # down does not read what up gives

    assert styles(find_steps(Lonely())) == {}
    with pytest.raises(ConfigError, match=r"no layer of Lonely was recognised.*tensor.plan"):
        make_plan(Lonely())


def test_a_layer_that_shares_a_cut_weight_is_cut_with_it():
    model = TinyGPT(tied=True)
    steps = make_plan(model, {"blocks.*.up": "column", "blocks.*.down": "row", "head": "gathered"}).steps
    assert styles(steps)["tokens"] == ("vocabulary", ())


def test_words_of_hugging_face_plans_are_understood():
    class Declared(TinyGPT):
        tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}  # noqa: RUF012

    plan = make_plan(Declared(tied=False))
    assert styles(plan.steps)["head"] == ("gathered", ())
    assert not plan.own_words


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.up": "colum"}, "did you mean 'column'"),
        ({"blocks.*.up": "moe_tp_experts"}, "does not exist here"),
        ({"blocks.*.upp": "column"}, r"matches no module of TinyGPT; did you mean 'blocks.[01].up'"),
        ({"norm": "column"}, "LayerNorm does not compute as torch.nn.Linear"),
        ({"head": "vocabulary"}, "Linear does not compute as torch.nn.Embedding"),
        ({"blocks.0.up": "column", "blocks.*.up": "row"}, "keep one"),
        ({"blocks.*.qkv": "column:5"}, "has 96 output features, which '5' does not divide"),
    ],
)
def test_mistakes_in_a_plan_are_named(plan, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(TinyGPT(), plan)


def test_a_layer_with_a_forward_of_its_own_is_not_taken_for_a_product():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.ModuleDict({"up": Scaled(8, 16), "down": nn.Linear(16, 8)})
    with pytest.raises(ConfigError, match="no layer"):
        make_plan(model)
    assert torch.is_tensor(model["up"].weight)
