import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trilithon.errors import ConfigError
from trilithon.models import GPT, PRESETS, GPTConfig, preset
from trilithon.models.rotary import Rotary

SHAPES = [
    {"norm": norm, "activation": activation, "tie_embeddings": tied}
    for norm in ("rms", "layer")
    for activation in ("gelu", "swiglu")
    for tied in (True, False)
]


def tiny(**changes) -> GPTConfig:
    shape = {"vocab_size": 31, "context": 12, "width": 24, "num_heads": 2, "num_layers": 2}
    return preset("nano", **(shape | changes))


def plain_forward(weights: dict[str, Tensor], config: GPTConfig, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one sequence in fp64, one position and one head at a time, straight from the definitions."""
    x = [weights["embedding.weight"][token] for token in tokens]
    for layer in range(config.num_layers):
        own = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items() if f"blocks.{layer}." in name}
        x = [a + b for a, b in zip(x, plain_attention(own, config, [plain_norm(own, "attention_norm", v) for v in x]))]
        x = [v + plain_mlp(own, config, plain_norm(own, "mlp_norm", v)) for v in x]
    return torch.stack([weights["head.weight"] @ plain_norm(weights, "norm", v) for v in x])


def plain_norm(weights: dict[str, Tensor], name: str, v: Tensor) -> Tensor:
    if f"{name}.bias" not in weights:
        return v / ((v * v).sum() / len(v) + 1e-5).sqrt() * weights[f"{name}.weight"]
    centred = v - v.sum() / len(v)
    return (
        centred / ((centred * centred).sum() / len(v) + 1e-5).sqrt() * weights[f"{name}.weight"]
        + weights[f"{name}.bias"]
    )


def plain_turn(v: Tensor, position: int, base: float) -> Tensor:
    half = len(v) // 2
    turned = v.clone()
    for i in range(half):
        angle = position * base ** (-2 * i / len(v))
        turned[i] = v[i] * math.cos(angle) - v[i + half] * math.sin(angle)
        turned[i + half] = v[i + half] * math.cos(angle) + v[i] * math.sin(angle)
    return turned


def plain_attention(weights: dict[str, Tensor], config: GPTConfig, x: list[Tensor]) -> list[Tensor]:
    size, width = config.head_width, config.width
    outputs = []
    for here in range(len(x)):
        heads = []
        for head in range(config.num_heads):
            rows = slice(head * size, (head + 1) * size)
            query_w, key_w, value_w = (weights["attention.qkv.weight"][part * width :][rows] for part in range(3))
            query = plain_turn(query_w @ x[here], here, config.rotary_base)
            scores = [
                query @ plain_turn(key_w @ x[there], there, config.rotary_base) / math.sqrt(size)
                for there in range(here + 1)
            ]
            shares = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            heads.append(sum(share * (value_w @ x[there]) for there, share in enumerate(shares)))
        outputs.append(weights["attention.out.weight"] @ torch.cat(heads))
    return outputs


def plain_mlp(weights: dict[str, Tensor], config: GPTConfig, v: Tensor) -> Tensor:
    up = weights["mlp.up.weight"] @ v
    if config.activation == "gelu":
        return weights["mlp.down.weight"] @ (up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))
    gate = weights["mlp.gate.weight"] @ v
    return weights["mlp.down.weight"] @ (gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_equal_the_definitions(shape):
    torch.manual_seed(0)
    config = tiny(init_std=0.3, **shape)  # large weights: attention is far from uniform
    model = GPT(config)
    tokens = torch.randint(31, (2, 9))
    targets = torch.randint(31, (2, 9))
    weights = {name: p.detach().double() for name, p in model.state_dict().items()}
    expected = torch.stack([plain_forward(weights, config, row.tolist()) for row in tokens])
    # fp64 against fp32 through two blocks: some hundred roundings of values of size 1 to 10
    torch.testing.assert_close(model(tokens).double(), expected, atol=2e-4, rtol=1e-4)
    picked = expected.log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets).double(), -picked.mean(), atol=1e-4, rtol=1e-4)


def test_later_tokens_do_not_change_earlier_logits():
    torch.manual_seed(0)
    model = GPT(tiny(init_std=0.3))
    tokens = torch.randint(31, (1, 10))
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], atol=1e-6, rtol=0)
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-2


def test_the_loss_before_training_is_that_of_guessing():
    torch.manual_seed(0)
    model = GPT(tiny(vocab_size=500, init_std=0.02))
    loss = model(torch.randint(500, (8, 12)), torch.randint(500, (8, 12)))
    assert loss.dtype == torch.float32 and abs(loss.item() - math.log(500)) < 0.1


def test_the_loss_of_a_bf16_model_is_fp32():
    model = GPT(tiny()).to(torch.bfloat16)
    assert model(torch.ones(1, 3, dtype=torch.long)).dtype == torch.bfloat16
    assert model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)).dtype == torch.float32


def test_weights_into_the_residual_stream_start_smaller_by_the_depth():
    torch.manual_seed(0)
    model = GPT(tiny(width=256, num_heads=4, num_layers=8, context=8))
    for block in model.blocks:
        for weight in (block.attention.qkv.weight, block.mlp.up.weight):
            assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        for weight in (block.attention.out.weight, block.mlp.down.weight):
            assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_parameters_is_that_of_the_model(shape):
    config = tiny(**shape)
    assert config.num_parameters() == sum(p.numel() for p in GPT(config).parameters())


@pytest.mark.parametrize("shape", SHAPES[::2])
def test_the_arithmetic_per_token_is_what_torch_counts(shape):
    config = tiny(**shape)
    model = GPT(config)
    tokens = torch.randint(31, (2, 12))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    # torch counts attention in full and as many products in its backward as recomputing it needs; compare without it
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(flops for op, flops in counts.items() if "attention" not in str(op))
    attention = config.num_layers * 3 * 2 * (2 * config.width) * 12 // 2
    assert config.training_flops_per_token(12) == 3 * 2 * config.matrix_parameters() + attention
    assert matrices == 24 * 6 * config.matrix_parameters()


def test_tied_embeddings_are_one_parameter_and_both_uses_reach_it():
    torch.manual_seed(0)
    tied, untied = GPT(tiny()), GPT(tiny(tie_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    untied.load_state_dict(tied.state_dict())
    tokens, targets = torch.randint(31, (2, 5)), torch.randint(31, (2, 5))
    tied(tokens, targets).backward()
    untied(tokens, targets).backward()
    both = untied.head.weight.grad + untied.embedding.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, atol=1e-6, rtol=1e-5)


def test_a_saved_model_holds_parameters_only():
    model = GPT(tiny())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | {"head.weight"}
    longer = GPT(tiny(context=100))
    longer.load_state_dict(model.state_dict())


def test_a_sequence_longer_than_the_context_is_an_error_with_both_numbers():
    with pytest.raises(ConfigError, match=r"13 tokens is longer than the model's context of 12"):
        GPT(tiny())(torch.zeros(1, 13, dtype=torch.long))


# rotary positions


def test_the_product_of_turned_vectors_depends_on_their_distance():
    rotary = Rotary(8, 64, 100.0)
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    queries = rotary(query.expand(1, 1, 64, 8))[0, 0]
    keys = rotary(key.expand(1, 1, 64, 8))[0, 0]
    for distance in (0, 1, 7, 30):
        products = (queries[distance:] * keys[: 64 - distance]).sum(-1)
        torch.testing.assert_close(products, products[:1].expand_as(products), atol=1e-5, rtol=1e-5)
    assert (queries[1] @ keys[0] - queries[0] @ keys[0]).abs() > 1e-3


def test_turning_keeps_lengths_and_position_0_is_unturned():
    rotary = Rotary(8, 16, 10_000.0)
    x = torch.randn(2, 3, 16, 8)
    torch.testing.assert_close(rotary(x).norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary(x)[:, :, 0], x[:, :, 0])


def test_tables_stay_fp32_when_parameters_do_not():
    rotary = Rotary(8, 512, 10_000.0)
    assert rotary.cos.dtype == torch.float32
    x = torch.randn(1, 1, 512, 8).bfloat16()
    assert rotary(x).dtype == torch.bfloat16
    # turned in bf16 with exact angles: the error is that of rounding a few products, not of an angle of 511 in bf16
    torch.testing.assert_close(rotary(x).float(), rotary(x.float()), atol=0.04, rtol=0.02)


# generation


def test_generating_without_chance_takes_the_likeliest_token_each_time():
    torch.manual_seed(0)
    model = GPT(tiny(init_std=0.3))
    tokens = torch.randint(31, (2, 3))
    out = model.generate(tokens, 14, temperature=0)
    assert out.shape == (2, 17) and torch.equal(out[:, :3], tokens)
    for position in range(3, 17):
        logits = model(out[:, max(position - 12, 0) : position])[:, -1]
        assert torch.equal(out[:, position], logits.argmax(-1))


def test_chance_comes_from_the_generator():
    model = GPT(tiny(init_std=0.3))
    start = torch.zeros(1, 1, dtype=torch.long)

    def draw(seed: int) -> list[int]:
        return model.generate(start, 20, generator=torch.Generator().manual_seed(seed)).flatten().tolist()

    assert draw(1) == draw(1) and draw(1) != draw(2)


def test_top_k_draws_among_the_likeliest_and_top_1_is_the_likeliest():
    torch.manual_seed(0)
    model = GPT(tiny(init_std=0.3))
    start = torch.randint(31, (1, 4))
    likeliest = set(model(start)[0, -1].topk(3).indices.tolist())
    drawn = {model.generate(start, 1, temperature=5.0, top_k=3)[0, -1].item() for _ in range(60)}
    assert drawn == likeliest
    assert torch.equal(model.generate(start, 5, top_k=1), model.generate(start, 5, temperature=0))


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}])
def test_impossible_ways_to_draw_are_refused(options):
    with pytest.raises(ConfigError, match="temperature >= 0 and top_k >= 1"):
        GPT(tiny()).generate(torch.zeros(1, 1, dtype=torch.long), 1, **options)


# shapes


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_their_order_is_by_size(name):
    sizes = [preset(each, 50_000).num_parameters() for each in PRESETS]
    assert sizes == sorted(sizes)
    assert preset(name, 50_000).head_width % 2 == 0


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match="nano, tiny, small"):
        preset("huge", 100)


def test_heads_that_do_not_divide_the_width_name_the_nearest_widths():
    with pytest.raises(ConfigError, match="nearest widths that do: 96 and 104"):
        preset("nano", 100, width=100, num_heads=4)
