"""What a hub would offer, made on the spot: a text, a tokenizer trained on it, and tiny models with random weights."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_VOCABULARY = 384


@dataclass(frozen=True, slots=True)
class Published:
    """Folders as `from_pretrained` reads them. gpt2's head is its embedding; llama's is not."""

    text: Path
    llama: Path
    gpt2: Path


def _tokenizer(text: Path) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    made.train(
        [str(text)],
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def publish(folder: Path) -> Published:
    """The text is the source of this Python's argparse: prose and code, on every machine."""
    text = folder / "text.txt"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    tokenizer = _tokenizer(text)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        **ids,
    )
    gpt2 = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
        **ids,
    )
    torch.manual_seed(11)
    for name, model in {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return Published(text, folder / "llama", folder / "gpt2")
