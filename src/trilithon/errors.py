"""The exceptions of trilithon, drawn first so that a reader knows what can be caught.

    TrilithonError
    |- ConfigError         a setting is wrong, or two settings do not go together
    |  `- BatchError             batch sizes and the number of ranks do not go together
    |- DataError           data is missing, empty or not what it should be
    |- CheckpointError     a checkpoint is damaged, incomplete or does not fit
    |- ProtocolError       a call came out of order
    |  `- ShardedParameterError   the values of a sharded parameter were read while only a slice of it is here
    |- CollectiveError     ranks disagree, or one of them went missing
    |- TierError           memory or a file that state rests in could not be had, read or written
    |- NonFiniteError      a loss or gradient is not finite and the policy says to stop
    `- LaunchError         processes could not be started, or one of them failed

Every message says what happened with the values involved, and then the way out.
"""

from __future__ import annotations


class TrilithonError(Exception):
    """Base of every exception that trilithon raises on purpose."""


class ConfigError(TrilithonError, ValueError):
    """A setting is wrong or settings contradict each other; the message names each key and what to write instead."""


class BatchError(ConfigError, AssertionError):
    """Batch sizes and ranks have no solution; an AssertionError too, as scripts written for DeepSpeed expect."""


class DataError(TrilithonError, ValueError):
    """Training data is missing, empty, unreadable or not text."""


class CheckpointError(TrilithonError):
    """A checkpoint cannot be written or read as asked."""


class ProtocolError(TrilithonError, RuntimeError):
    """A call came at a point where it has no meaning, such as a step without a backward."""


class ShardedParameterError(ProtocolError):
    """Values of a ZeRO-3 parameter were read where only this rank's slice of them exists."""


class CollectiveError(TrilithonError, RuntimeError):
    """A collective could not complete: a rank is missing or the ranks called different things."""


class TierError(TrilithonError, RuntimeError):
    """State could not be kept, read or written where it rests (host memory, disk); names the file and the operation."""


class NonFiniteError(TrilithonError, ArithmeticError):
    """A loss, gradient or norm is NaN or infinite and the policy in force is to stop."""


class LaunchError(TrilithonError, RuntimeError):
    """Processes could not be started, or one of them failed."""
