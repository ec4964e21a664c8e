"""The Llama- and BERT-shaped models against their formulas, written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from trilithon.errors import ConfigError
from trilithon.models import GPT, Bert, BertConfig, GPTConfig, Llama, LlamaConfig
from trilithon.models.layers import AttentionCore

LLAMA = LlamaConfig(vocab_size=31, context=8, num_layers=1, width=16, num_heads=4, num_kv_heads=2, inner_width=24)
BERT = BertConfig(vocab_size=31, context=8, num_layers=1, width=16, num_heads=4, inner_width=24)


def attention(query, key, value, mask):
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ value


def test_llama_is_its_formula():
    model = Llama(LLAMA)
    tokens = torch.randint(0, 31, (2, 6))
    block = model.blocks[0]
    x = model.embedding.weight[tokens]
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.attention_norm.weight
    heads = [(y @ p.weight.T).view(2, 6, -1, 4).transpose(1, 2) for p in (block.attention.q, block.attention.k)]
    rotary = block.attention.attend.core.rotary
    query, key = (rotary(head) for head in heads)
    value = (y @ block.attention.v.weight.T).view(2, 6, -1, 4).transpose(1, 2)
    # queries 0 and 1 share the first head of keys, 2 and 3 the second
    key, value = (torch.stack([part[:, h // 2] for h in range(4)], 1) for part in (key, value))
    mixed = attention(query, key, value, torch.ones(6, 6, dtype=torch.bool).tril())
    x = x + mixed.transpose(1, 2).flatten(2) @ block.attention.out.weight.T
    y = block.mlp_norm(x)
    x = x + (F.silu(y @ block.mlp.gate.weight.T) * (y @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T
    torch.testing.assert_close(model(tokens), model.norm(x) @ model.head.weight.T)


def test_bert_sees_both_directions_but_no_padding():
    model = Bert(BERT).eval()
    tokens = torch.randint(0, 31, (1, 8))
    keep = torch.arange(8)[None] < 5
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 31
    assert torch.equal(model(tokens, keep_BT=keep)[:, :5], model(changed, keep_BT=keep)[:, :5])
    later = tokens.clone()
    later[0, 4] = (later[0, 4] + 1) % 31
    assert not torch.allclose(model(tokens)[:, 0], model(later)[:, 0])


def test_berts_loss_is_the_mean_over_the_masked_tokens():
    model = Bert(BERT).eval()
    tokens = torch.randint(0, 31, (2, 8))
    targets = tokens.where(torch.arange(8) % 3 == 0, -100)
    expected = F.cross_entropy(model(tokens)[targets != -100], targets[targets != -100])
    torch.testing.assert_close(model(tokens, targets), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_dropped_attention_weights_leave_the_mean_alone(causal):
    """With a rate near zero the explicit form is SDPA's."""
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind(0)
    exact = AttentionCore(causal=causal)(query, key, value)
    nearly = AttentionCore(causal=causal, dropout=1e-9)(query, key, value)
    torch.testing.assert_close(nearly, exact)


def test_dropout_acts_in_training_only():
    config = GPTConfig(vocab_size=31, context=8, num_layers=1, width=16, num_heads=2, dropout=0.5)
    model, tokens = GPT(config), torch.randint(0, 31, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LlamaConfig(**{**LLAMA.model_dump(), "num_kv_heads": 3}), "as many queries"),
        (lambda: BertConfig(**{**BERT.model_dump(), "num_heads": 3}), "does not split into num_heads=3"),
        (lambda: Llama(LLAMA)(torch.zeros(1, 9, dtype=torch.int64)), "9 tokens is longer"),
        (lambda: Bert(BERT)(torch.zeros(1, 9, dtype=torch.int64)), "9 tokens is longer"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
