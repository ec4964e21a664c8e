"""The batch triple: global size = micro size x accumulation x data-parallel ranks.

Any two of the three determine the third; `resolve` solves it once the number of data-parallel ranks is known, and a
contradiction is an error that names every number and the nearest sizes that work.
"""

from __future__ import annotations

from trilithon.config.base import Positive, Section, show
from trilithon.errors import BatchError, ConfigError


class ResolvedBatch(Section):
    """A solved triple: global_size == micro_size * accumulation * data_parallel_size."""

    global_size: Positive
    """Samples behind one update, over all ranks and micro-batches."""
    micro_size: Positive
    """Samples of one forward on one rank."""
    accumulation: Positive
    """Micro-batches added up before one update."""
    data_parallel_size: Positive
    """Ranks that see different data."""


class BatchConfig(Section):
    """Sizes of batches. What is left out is derived; with nothing given, micro_size and accumulation are 1."""

    global_size: Positive | None = None
    """Samples behind one update, over all ranks and micro-batches. null: derived."""
    micro_size: Positive | None = None
    """Samples of one forward on one rank. null: derived."""
    accumulation: Positive | None = None
    """Micro-batches added up before one update. null: derived."""

    def resolve(self, data_parallel_size: int | None) -> ResolvedBatch:
        """Solve the triple for a number of data-parallel ranks.

        Raises ConfigError when the number of ranks is missing or not positive, and BatchError when no whole solution
        exists; its message names the values given, the number of ranks and the nearest sizes that work.
        """
        ranks = _checked_ranks(data_parallel_size)
        size, micro, steps = self.global_size, self.micro_size, self.accumulation
        if size is None:
            micro, steps = micro or 1, steps or 1
            size = micro * steps * ranks
        elif micro is not None:
            steps = steps or size // (micro * ranks)
        else:
            steps = steps or 1
            micro = size // (steps * ranks)
        if micro * steps * ranks != size:
            raise BatchError(_contradiction(size, self.micro_size, self.accumulation, ranks))
        return ResolvedBatch(global_size=size, micro_size=micro, accumulation=steps, data_parallel_size=ranks)


def data_parallel_size(world_size: int | None, model_parallel_size: int = 1) -> int:
    """Ranks that see different data: world_size / model_parallel_size.

    Raises ConfigError when either is missing, not positive, or they do not divide.
    """
    if not _is_positive(world_size):
        raise ConfigError(f"world_size={show(world_size)}: give the number of processes, a whole number of at least 1.")
    if not _is_positive(model_parallel_size):
        raise ConfigError(
            f"model_parallel_size={show(model_parallel_size)}: give a whole number of at least 1; 1 means no model "
            "parallelism."
        )
    assert world_size is not None
    if world_size % model_parallel_size:
        raise ConfigError(
            f"world_size={world_size} does not split into groups of model_parallel_size={model_parallel_size}. "
            f"Nearest world sizes that do: {_nearest(world_size, model_parallel_size)}."
        )
    return world_size // model_parallel_size


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _checked_ranks(ranks: int | None) -> int:
    if not _is_positive(ranks):
        raise ConfigError(
            f"data_parallel_size={show(ranks)}: batch sizes cannot be solved without the number of data-parallel "
            "ranks. Start the processes first, or give a whole number of at least 1 (trilithon check --world-size N)."
        )
    assert ranks is not None
    return ranks


def _nearest(size: int, unit: int) -> str:
    """The multiples of `unit` next to `size`, as text."""
    below = size // unit * unit
    return f"{below} and {below + unit}" if below else f"{unit}"


def _contradiction(size: int, micro: int | None, steps: int | None, ranks: int) -> str:
    """The message for a triple without a solution: all values, the product they must equal, what to change."""
    values = {"micro_size": micro, "accumulation": steps}
    given = {f"batch.{name}": value for name, value in values.items() if value is not None}
    named = ", ".join(f"{name}={value}" for name, value in {"batch.global_size": size, **given}.items())
    missing = "" if len(given) == 2 else f" ({' and '.join(name for name in values if values[name] is None)} not given)"
    unit = (micro or 1) * (steps or 1) * ranks
    text = f"{named}{missing} do not go together on {ranks} data-parallel ranks: global_size must be "
    if micro is None or steps is None:
        product = " x ".join(str(value) for value in (micro, steps, ranks) if value is not None)
        multiple = product if product == str(unit) else f"{product} = {unit}"
        return (
            f"{text}a multiple of {multiple}. Change batch.global_size; the nearest sizes that work: "
            f"{_nearest(size, unit)}."
        )
    ways = [f"batch.global_size to {unit}"]
    if size % (micro * ranks) == 0:
        ways.append(f"batch.accumulation to {size // (micro * ranks)}")
    if size % (steps * ranks) == 0:
        ways.append(f"batch.micro_size to {size // (steps * ranks)}")
    if size % (micro * ranks):
        ways.append(f"batch.global_size to {_nearest(size, micro * ranks)} with batch.accumulation left out")
    return (
        f"{text}micro_size x accumulation x ranks = {micro} x {steps} x {ranks} = {unit}. Change {', or '.join(ways)}."
    )
