"""`MoE`: a layer of experts behind a router, in place of a feed-forward block.

    layer = trilithon.MoE(hidden_size=512, expert=FeedForward(512, 2048), num_experts=8, ep_size=2, k=1)
    y, balance, counts = layer(x)
    loss = task_loss + 0.01 * balance

By itself it is an ordinary module with all experts. `trilithon.initialize` spreads the experts of layers with
`ep_size` > 1 over the data-parallel ranks; tokens then travel by all-to-all. With one rank per expert group nothing
travels and no collective runs. (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2; Fedus et al. 2021,
arXiv:2101.03961; Rajbhandari et al. 2022, arXiv:2201.05596; names of arguments as in DeepSpeed.)
"""

# S tokens, E experts, K choices per token, M width, C slots per expert

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError, ProtocolError
from trilithon.parallel.moe.balance import Counts, Scope, balance_loss, z_loss
from trilithon.parallel.moe.dispatch import Rows, by_expert, combine, reorder, rows_of, scatter
from trilithon.parallel.moe.experts import Expert, Experts, Init, dense_twin, with_bias
from trilithon.parallel.moe.gate import Choice, DropPolicy, Gate, NormTopK, RoutingRule, combine_weights, decide
from trilithon.parallel.moe.travel import ExpertRanks, all_rows, counts_of_share, exchange, own_rows

_REMEMBERED = 4096  # forwards whose keys a recomputation may draw again


class MoE(nn.Module):
    """[..., M] -> ([..., M], balance loss [], counts [E] i64).

    hidden_size: M. expert: a module [n, M] -> [n, M], or a function that makes one. ep_size: over how many ranks the
    experts are spread; None for as many as divide the ranks and do not exceed the experts. k: experts per token.
    capacity_factor: slots of an expert per token that it would get at uniform load, at least `min_capacity` slots; in
    evaluation `eval_capacity_factor`, None to drop nothing there. drop_tokens: False never drops.
    noisy_gate_policy: "Jitter" or "RSample". use_rts: with k=1, a lottery decides who keeps the slots of a crowded
    expert, else position does. top2_2nd_expert_sampling: with k=2 the second expert is drawn. use_residual: adds the
    expert's dense twin, mixed with the experts' output by two learned coefficients (or summed, `residual_combine`).
    drop_policy, norm_topk_prob, aux_loss_scope, aux_loss_counts: see `gate` and `balance`. z_loss_coeff: of the z-loss,
    relative to the balance loss, to which it is added.

    The balance loss is for the caller to add to the loss, times a coefficient; counts are tokens by chosen expert on
    this rank. `last` holds both, and what was kept, after each forward.
    """

    def __init__(  # noqa: PLR0917 (the order of DeepSpeed's arguments)
        self,
        hidden_size: int,
        expert: Expert,
        num_experts: int = 1,
        ep_size: int | None = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        drop_policy: DropPolicy | None = None,
        norm_topk_prob: NormTopK = "post_drop",
        aux_loss_scope: Scope = "local",
        aux_loss_counts: Counts = "all",
        z_loss_coeff: float = 0.0,
        expert_init: Init = "independent",
        residual_combine: str = "learned",
    ) -> None:
        super().__init__()
        noise = None if noisy_gate_policy in (None, "None") else noisy_gate_policy
        _check(num_experts, k, ep_size, capacity_factor, eval_capacity_factor, min_capacity, noise, residual_combine)
        if use_tutel:
            warnings.warn("use_tutel has no effect: batched experts and index tables are built in.", stacklevel=2)
        self.hidden_size, self.num_experts, self.ep_size, self.k = hidden_size, num_experts, ep_size, k
        policy = drop_policy or (("rts" if use_rts else "position") if k == 1 else "probs")
        self.rule = RoutingRule(
            k,
            capacity_factor if drop_tokens else None,
            min_capacity,
            policy,
            noise,  # type: ignore[arg-type]
            top2_2nd_expert_sampling and k == 2,
            norm_topk_prob,
        )
        after = "probs" if policy == "rts" else policy
        self.eval_rule = RoutingRule(
            k, eval_capacity_factor if drop_tokens else None, min_capacity, after, None, False, norm_topk_prob
        )
        self.scope: Scope = aux_loss_scope
        self.counts: Counts = aux_loss_counts
        self.z_loss_coeff = z_loss_coeff
        self.gate = Gate(hidden_size, num_experts)
        self.experts = Experts(expert, num_experts, expert_init)
        self.mlp: nn.Module | None = None
        self.coefficient: nn.Linear | None = None
        if use_residual:
            self.mlp = dense_twin(expert)
            self.coefficient = nn.Linear(hidden_size, 2) if residual_combine == "learned" else None
        self.last: Last | None = None
        self.tensor_sliced_experts = enable_expert_tensor_parallelism  # refused on a mesh with a tensor axis
        self.name = "MoE"
        self.loss_factor = 1.0  # what the engine multiplies the loss of the running backward by
        self.data_rank = 0  # mixed into the draws: ranks with different tokens draw differently
        self._ranks: ExpertRanks | None = None  # None: no other rank takes part
        self._data: Collectives | None = None
        self._choices: weakref.WeakValueDictionary[int, Choice] = weakref.WeakValueDictionary()
        self._drawn: deque[int] = deque(maxlen=_REMEMBERED)  # tokens of forwards, for recomputations to find

    # -------------------------------------------------------------------------------------------------- on ranks
    def bind(self, name: str, ranks: ExpertRanks, data: Collectives | None, data_rank: int) -> None:
        """Called by the engine: each rank of `ranks.group` keeps its part of the experts, and tokens travel there;
        statistics of scope "global" are summed over `data`."""
        self.name, self.data_rank, self._data = name, data_rank, data
        self._ranks = ranks if ranks.spread or ranks.tensor is not None else None
        if ranks.spread:
            here = self.num_experts // ranks.group.world_size
            self.experts.hold_only(ranks.group.rank * here, here)

    def unbind(self) -> None:
        """Collective over the expert group: the layer has all experts again."""
        ranks, self._ranks, self._data = self._ranks, None, None
        if ranks is None or not ranks.spread:
            return
        for name, param in self.experts.named_parameters():
            whole = param.data.new_empty(self.num_experts, *param.shape[1:])
            ranks.group.all_gather(whole, param.data.contiguous(), Tag(self.name, (name,))).wait()
            param.data = whole
        self.experts.first, self.experts.here = 0, self.num_experts

    # ------------------------------------------------------------------------------------------------- forward
    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """used_token: [...] of the shape of the tokens, false or 0 for padding, which is neither routed nor counted."""
        x_SM = hidden_states.reshape(-1, self.hidden_size)
        used = None if used_token is None else used_token.reshape(-1).to(x_SM.device) != 0
        rule = self.rule if self.training else self.eval_rule
        key, generator = self._chance(rule, x_SM.device)
        logits_SE, probs_SE = self.gate(x_SM, generator if rule.noise == "Jitter" else None)
        choice = self._choices.get(key)
        replay = choice is not None
        if choice is None:
            choice = decide(logits_SE, probs_SE, rule, used, generator)
            if self.training:
                self._choices[key] = choice
        weights_SK = combine_weights(probs_SE, choice, rule)
        y_SM = self._through_experts(x_SM, weights_SK, choice)
        balance = self._balance(logits_SE, probs_SE, choice, hidden_states)
        if not replay:
            self.last = Last(balance.detach(), choice.routed, choice.kept_counts, choice.capacity)
        if self.mlp is not None:
            y_SM = self._with_residual(x_SM, y_SM)
        return y_SM.view(hidden_states.shape), balance, choice.routed

    def _through_experts(self, x_SM: Tensor, weights_SK: Tensor, choice: Choice) -> Tensor:
        rows = rows_of(choice, None if choice.capacity is None else self._slots(choice.capacity, x_SM.device))
        grouped_NM = scatter(x_SM, rows)
        tensor = self._ranks.tensor if self._ranks is not None else None
        if tensor is None:
            return combine(self._experts_of(grouped_NM, rows), weights_SK, rows)
        mine = own_rows(grouped_NM, tensor, Tag(f"{self.name}, own rows"))
        done = all_rows(self._experts_of(mine, rows), len(grouped_NM), tensor, Tag(f"{self.name}, all rows"))
        return combine(done, weights_SK, rows)

    def _slots(self, capacity: int, device: torch.device) -> int:
        """Rows of each expert: the largest capacity of any rank, since ranks may have different numbers of tokens, in
        equal shares for ranks with the same tokens."""
        ranks = self._ranks
        if ranks is None:
            return capacity
        if ranks.spread:
            capacity = ranks.largest(capacity, device, Tag(f"{self.name}, slots"))
        parts = ranks.share[1]
        return -(-capacity // parts) * parts

    def _experts_of(self, rows_NM: Tensor, table: Rows) -> Tensor:
        """[N, M] -> [N, M]: what the experts make of this rank's share of the rows."""
        share = self._ranks.share if self._ranks is not None else (0, 1)
        if table.per_expert is not None:
            return self._padded(rows_NM, table.per_expert // share[1])
        return self._dropless(rows_NM, counts_of_share(table.choice.kept_counts, share))

    def _padded(self, rows: Tensor, slots: int) -> Tensor:
        """[E * C, M] -> [E * C, M], C slots for every expert."""
        ranks, width = self._ranks, self.hidden_size
        if ranks is None or not ranks.spread:
            out: Tensor = self.experts(rows.view(self.num_experts, slots, width))
            return out.reshape(-1, width)
        number, here, trip = ranks.group.world_size, self.experts.here, ranks.equal()
        arrived = exchange(rows, trip, Tag(f"{self.name}, dispatch"))
        stacked = arrived.view(number, here, slots, width).transpose(0, 1).reshape(here, number * slots, width)
        done: Tensor = self.experts(stacked).view(here, number, slots, width).transpose(0, 1).reshape(-1, width)
        return exchange(done, trip, Tag(f"{self.name}, return"), home=True)

    def _dropless(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[n, M], expert by expert -> [n, M]. counts: [E] rows of each."""
        ranks = self._ranks
        if ranks is None or not ranks.spread:
            out: Tensor = self.experts(rows, counts.tolist())
            return out
        here = self.experts.here
        trip, receive = ranks.counted(counts.view(ranks.group.world_size, here), Tag(f"{self.name}, counts"))
        order, inverse = by_expert(receive)
        arrived = exchange(rows, trip, Tag(f"{self.name}, dispatch"))
        done = self.experts(reorder(arrived, order, inverse), receive.sum(0).tolist())
        return exchange(reorder(done, inverse, order), trip, Tag(f"{self.name}, return"), home=True)

    def _with_residual(self, x_SM: Tensor, y_SM: Tensor) -> Tensor:
        """The dense branch (Rajbhandari et al. 2022, arXiv:2201.05596, section 4.1); a dropped token still has it."""
        assert self.mlp is not None
        dense: Tensor = with_bias(self.mlp(x_SM))
        if self.coefficient is None:
            return y_SM + dense
        mix: Tensor = self.coefficient(x_SM).softmax(dim=-1)
        return y_SM * mix[:, 0:1] + dense * mix[:, 1:2]

    def _balance(self, logits: Tensor, probs: Tensor, choice: Choice, hidden: Tensor) -> Tensor:
        sequences = hidden.shape[0] if self.scope == "sequence" and hidden.dim() > 2 and hidden.numel() else 1
        total = self._sum_over_data if self.scope == "global" else None
        loss = balance_loss(
            probs, choice.experts, choice.used, counts=self.counts, num_sequences=sequences, total=total
        )
        return loss + self.z_loss_coeff * z_loss(logits, choice.used) if self.z_loss_coeff else loss

    def _sum_over_data(self, local: Tensor) -> tuple[Tensor, int]:
        if self._data is None or self._data.world_size == 1:
            return local, 1
        total = local.clone()
        self._data.all_reduce(total, Tag(f"{self.name}, balance")).wait()
        return total, self._data.world_size

    # -------------------------------------------------------------------------------------------------- chance
    def _chance(self, rule: RoutingRule, device: torch.device) -> tuple[int, torch.Generator | None]:
        """The key of this forward, and its source of chance; -1 and None in evaluation.

        The key is drawn from the program's own generator, whose state activation checkpointing restores: a
        recomputation draws the same key and finds the same routing.
        """
        if not self.training:
            return -1, None
        key = int(torch.randint(2**62, (), device="cpu"))
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and rule.random and key not in self._drawn:
            raise ProtocolError(
                f"{self.name}: backward recomputes this layer from another random state than its forward had, so "
                "tokens would be routed anew. Use checkpoint(..., preserve_rng_state=True), or "
                "drop_policy='position' without noise."
            )
        if not recomputing:
            self._drawn.append(key)
        if not rule.random:
            return key, None
        digest = hashlib.blake2b(f"{key}|{self.data_rank}".encode(), digest_size=8).digest()
        return key, torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def __getstate__(self) -> dict[str, Any]:
        if self.experts.here != self.num_experts:
            raise ProtocolError(
                f"{self.name} cannot be copied or pickled while its experts are spread over ranks: this rank holds a "
                "part of them. engine.state_dict() gives whole copies; engine.close() gives the whole model back."
            )
        return {**self.__dict__, "_choices": None, "_drawn": None, "_ranks": None, "_data": None, "last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choices, self._drawn = weakref.WeakValueDictionary(), deque(maxlen=_REMEMBERED)

    def extra_repr(self) -> str:
        ranks = self._ranks
        spread = f"ep_size={self.ep_size}" if ranks is None else f"over {ranks.group.world_size} ranks"
        factor = "dropless" if self.rule.capacity_factor is None else f"capacity {self.rule.capacity_factor:g}"
        return f"{self.num_experts} experts, k={self.k}, {factor}, {spread}"


class Last:
    """What the last forward of a layer did on this rank: the balance loss [], tokens by chosen expert and those kept
    [E], and the slots of an expert (None: as many as needed)."""

    def __init__(self, balance: Tensor, routed: Tensor, kept: Tensor, capacity: int | None) -> None:
        self.balance, self.routed, self.kept, self.capacity = balance, routed, kept, capacity

    @property
    def drop_rate(self) -> float:
        """Share of the choices that found no room."""
        routed = int(self.routed.sum())
        return 1 - int(self.kept.sum()) / routed if routed else 0.0


def _check(  # noqa: PLR0917 (all that can be wrong, in one message)
    num_experts: int, k: int, ep_size: int | None, factor: float, eval_factor: float | None, minimum: int,
    noise: str | None, residual_combine: str,
) -> None:  # fmt: skip
    wrong = []
    if not 1 <= k <= num_experts:
        wrong.append(f"k={k} experts per token of num_experts={num_experts}: k goes from 1 to the number of experts")
    if ep_size is not None and (ep_size < 1 or num_experts % ep_size):
        wrong.append(f"num_experts={num_experts} does not split over ep_size={ep_size} ranks: choose a divisor")
    if factor <= 0 or (eval_factor is not None and eval_factor <= 0):
        wrong.append(f"capacity_factor={factor}, eval_capacity_factor={eval_factor}: both are above 0")
    if minimum < 0:
        wrong.append(f"min_capacity={minimum}: it is at least 0")
    if noise not in (None, "Jitter", "RSample"):
        wrong.append(f"noisy_gate_policy={noise!r}: it is None, 'Jitter' or 'RSample'")
    if residual_combine not in ("learned", "sum"):
        wrong.append(f"residual_combine={residual_combine!r}: it is 'learned' or 'sum'")
    if wrong:
        raise ConfigError("MoE: " + "; ".join(wrong) + ".")
