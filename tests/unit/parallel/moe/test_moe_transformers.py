"""Models of Hugging Face transformers, where it is installed: the same outputs, with experts of ours inside."""

import pytest
import torch

from trilithon.parallel.moe import convert, layers

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip


def small(kind):
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    elif kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    else:
        make = transformers.Qwen2MoeConfig if kind == "qwen2" else transformers.Qwen3MoeConfig
        config = make(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                      **({"shared_expert_intermediate_size": 20} if kind == "qwen2" else {}))  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.2)
    return model


@pytest.mark.parametrize("kind", ["mixtral", "qwen2", "qwen3"])
def test_models_with_experts_give_the_same_logits_and_train(kind):
    model, tokens = small(kind).eval(), torch.randint(50, (2, 7))
    before = model(tokens).logits
    assert convert(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert torch.allclose(model(tokens).logits, before, rtol=1e-4, atol=1e-4)
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
    assert len(list(layers(model))) == 2


def test_a_dense_model_gets_experts():
    model, tokens = small("llama").eval(), torch.randint(50, (2, 7))
    before = model(tokens).logits
    assert convert(model, 4, k=2, where="*.mlp", every=2) == ["model.layers.1.mlp"]
    assert torch.allclose(model(tokens).logits, before, rtol=1e-4, atol=1e-4)
