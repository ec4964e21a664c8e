"""What all ranks have to know of the layers of experts, whichever stage of a pipeline has them.

Each stage has layers of its own, perhaps with other degrees than the next one. But process groups are made by all ranks
in one order, rules with one norm per tensor share one table, and a stage that cannot go on after an exception holds up
the others. So the stages tell each other once, before anything is made, and what one of them refuses all refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError
from trilithon.optim.tensors import Stack


@dataclass(frozen=True)
class KnownExperts:
    """Of the layers of one stage, or of all of them.

    degrees: expert-parallel degrees, 1 among them for layers that every rank has whole. balanced: the statistics of
    some layer are those of all ranks. described: for each layer spread over ranks, its degree and the order of ranks.
    stacks: by name, the parameters in which experts lie one after the other.
    """

    degrees: frozenset[int] = frozenset()
    balanced: bool = False
    described: Mapping[str, list[int]] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    @property
    def spread(self) -> list[int]:
        """The degrees above 1."""
        return sorted(self.degrees - {1})


def of_all_stages(here: KnownExperts, refusal: str | None, everyone: Collectives) -> KnownExperts:
    """Collective: what all ranks know together. refusal: why this rank cannot go on.

    Raises ConfigError on all ranks when one of them cannot.
    """
    told: Sequence[tuple[str | None, KnownExperts]] = everyone.all_gather_object((refusal, here), Tag("experts"))
    refusals = list(dict.fromkeys(text for text, _ in told if text is not None))
    if refusals:
        raise ConfigError(" ".join(refusals))
    known = [one for _, one in told]
    return KnownExperts(
        frozenset().union(*(one.degrees for one in known)),
        any(one.balanced for one in known),
        {name: place for one in known for name, place in one.described.items()},
        {name: stack for one in known for name, stack in one.stacks.items()},
    )
