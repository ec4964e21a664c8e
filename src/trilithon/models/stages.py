"""A decoder as the layers that a pipeline cuts: token embedding, blocks, and the output matrix with its norm."""

from __future__ import annotations

from torch import nn

from trilithon.parallel.pipeline.layers import Layer, Run, trainable_numel


def decoder_layers(model: nn.Module, embed: Run, predict: Run) -> list[Layer]:
    """model: with modules called embedding, blocks, norm and head. embed, predict: what comes before and after them."""
    blocks = model.get_submodule("blocks")
    found = [Layer(embed, ("embedding",), "Embedding", trainable_numel(model.get_submodule("embedding")))]
    for name, block in blocks.named_children():
        found.append(Layer(_through(blocks, name), (f"blocks.{name}",), type(block).__name__, trainable_numel(block)))
    return [*found, Layer(predict, ("norm", "head"), "Head", trainable_numel(model.get_submodule("head")))]


def _through(blocks: nn.Module, name: str) -> Run:
    def run(x: object) -> object:  # looked up at each call: it may have been replaced meanwhile
        return blocks.get_submodule(name)(x)

    return run
