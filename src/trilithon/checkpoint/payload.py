"""Files of tensors: safetensors, written as a stream and read back in ranges of which every byte is checked.

The format is that of the safetensors library (an 8-byte length, a JSON header, then the values, little-endian and
without gaps), so any program that reads safetensors reads these files. A tensor that is whole in one file has its true
shape there, under "part/name"; a range of one is flat, under "part/name[start:stop]".
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint import durable
from trilithon.checkpoint.digest import Digester, block_digest
from trilithon.checkpoint.manifest import Chunk, FileRecord
from trilithon.checkpoint.table import Span
from trilithon.errors import CheckpointError

_ALIGNMENT = 64  # of the values in the file: a multiple of every item size, so that no element crosses a block
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def key_of(span: Span) -> str:
    """The name of a span in a file."""
    name = f"{span.part}/{span.name}"
    return name if span.whole else f"{name}[{span.start}:{span.start + span.numel}]"


def header_of(spans: Sequence[Span]) -> bytes:
    """The beginning of a file that holds these spans in this order; its length is a multiple of 64."""
    return tensor_header(
        [(key_of(span), span.dtype, span.shape if span.whole else (span.numel,)) for span in spans], {"format": "pt"}
    )


def tensor_header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file with these (name, type, shape) in this order; a multiple of 64 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        code = _CODES.get(dtype)
        if code is None:
            raise CheckpointError(f"'{name}' is of type {dtype}, which safetensors cannot hold.")
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_bytes(spans: Sequence[Span]) -> int:
    """The size of the file that `write_payload` makes of these spans."""
    return len(header_of(spans)) + sum(span.bytes for span in spans)


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of flat values; on the host without a copy."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian; this machine is not, and cannot read or write them.")
    flat = values.detach().reshape(-1).contiguous().cpu()
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


def write_payload(
    path: Path, spans: Sequence[Span], values: Iterator[Tensor], progress: Callable[[int], None] | None = None
) -> tuple[FileRecord, list[Chunk]]:
    """Write one file and sync it; values: one flat tensor for each span, in order. progress: told of bytes written."""
    digester, chunks = Digester(), []
    header = header_of(spans)
    descriptor = durable.create(path)
    try:
        at = len(header)
        digester.update(memoryview(header))
        durable.write(descriptor, memoryview(header), path)
        for span, tensor in zip(spans, values, strict=True):
            assert tensor.numel() == span.numel and tensor.dtype == span.dtype, f"{key_of(span)}: {tensor.shape}"
            chunks.append(Chunk(path.name, at, span.start, span.numel))
            raw = bytes_of(tensor)
            digester.update(raw)
            durable.write(descriptor, raw, path)
            at += len(raw)
            if progress is not None:
                progress(len(raw))
        durable.sync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileRecord(digester.bytes, tuple(digester.finish())), chunks


class VerifiedFiles:
    """Reads ranges of the files of one checkpoint; what it returns has been checked against the manifest's digests.

    A few blocks are kept, so that tensors that share one cost one read. bytes_read: from files, so far.
    """

    def __init__(self, folder: Path, records: dict[str, FileRecord], block_bytes: int, *, keep: int = 2) -> None:
        self._folder, self._records, self._block_bytes, self._keep = folder, records, block_bytes, keep
        self._open: dict[str, int] = {}
        self._blocks: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self.bytes_read = 0

    def __enter__(self) -> VerifiedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._blocks.clear()

    def read(self, file: str, offset: int, count: int) -> Iterator[memoryview]:
        """The bytes [offset, offset + count) of a file, in portions that end where a block does."""
        self._record(file, offset, count)
        while count:
            index, inside = divmod(offset, self._block_bytes)
            portion = min(count, self._block_bytes - inside)
            yield memoryview(self._block(file, index))[inside : inside + portion]
            offset, count = offset + portion, count - portion

    def read_into(self, file: str, offset: int, into: memoryview) -> None:
        """As `read`, to where the bytes belong: whole blocks without a copy in between."""
        at, count = 0, len(into)
        self._record(file, offset, count)
        while at < count:
            index, inside = divmod(offset + at, self._block_bytes)
            portion = min(count - at, self._block_bytes - inside)
            whole = inside == 0 and portion == self._block_bytes and (file, index) not in self._blocks
            if whole:
                self._fetch(file, index, into[at : at + portion])
            else:
                into[at : at + portion] = memoryview(self._block(file, index))[inside : inside + portion]
            at += portion

    def _record(self, file: str, offset: int, count: int) -> FileRecord:
        record = self._records.get(file)
        if record is None or offset < 0 or offset + count > record.bytes:
            raise CheckpointError(f"{self._folder / file}: bytes {offset} to {offset + count} are not in the manifest.")
        return record

    def _block(self, file: str, index: int) -> bytearray:
        found = self._blocks.get((file, index))
        if found is not None:
            self._blocks.move_to_end((file, index))
            return found
        record, start = self._records[file], index * self._block_bytes
        reuse = self._blocks.popitem(last=False)[1] if len(self._blocks) >= self._keep else None
        length = min(self._block_bytes, record.bytes - start)
        block = reuse if reuse is not None and len(reuse) == length else bytearray(length)
        self._fetch(file, index, memoryview(block))
        self._blocks[file, index] = block
        return block

    def _fetch(self, file: str, index: int, block: memoryview) -> None:
        """Read one block and check it."""
        start = index * self._block_bytes
        self._fill(file, start, block)
        if block_digest(block) != self._records[file].blocks[index]:
            raise CheckpointError(
                f"{self._folder / file} is damaged: bytes {start} to {start + len(block) - 1} do not match their "
                "digest in the manifest. Load another checkpoint; `trilithon checkpoint verify` names every damage."
            )

    def _fill(self, file: str, start: int, view: memoryview) -> None:
        at, descriptor = start, self._descriptor(file)
        while view:
            try:
                got = os.preadv(descriptor, [view], at)
            except OSError as error:
                raise CheckpointError(f"{self._folder / file} cannot be read: {error.strerror}.") from error
            if got == 0:
                raise self._wrong_size(file, os.fstat(descriptor).st_size)
            view, at = view[got:], at + got
            self.bytes_read += got

    def _descriptor(self, file: str) -> int:
        if file in self._open:
            return self._open[file]
        path = self._folder / file
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, and the manifest names it. Load another checkpoint.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        self._open[file] = descriptor
        size = os.fstat(descriptor).st_size
        if size != self._records[file].bytes:
            raise self._wrong_size(file, size)
        return descriptor

    def _wrong_size(self, file: str, size: int) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / file} has {size} bytes, and the manifest says {self._records[file].bytes}: it was cut or "
            "replaced. Load another checkpoint."
        )
