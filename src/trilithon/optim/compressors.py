"""From the compressor section of the configuration to the compressor that runs."""

from __future__ import annotations

from trilithon.comm.blockwise import Blockwise
from trilithon.comm.cast import Cast
from trilithon.comm.compressor import Compressor
from trilithon.comm.sign import Sign
from trilithon.comm.topk import TopK
from trilithon.config.compressed import CompressorConfig, QuantCompressor, SignCompressor, TopKCompressor


def make_compressor(section: CompressorConfig) -> Compressor:
    """The compressor that `section` names."""
    match section:
        case SignCompressor():
            return Sign(section.norm, section.scope)
        case TopKCompressor():
            return TopK(section.ratio, section.value_bytes)
        case QuantCompressor():
            return Blockwise(section.bits, section.block)
        case _:
            return Cast(section.kind)
