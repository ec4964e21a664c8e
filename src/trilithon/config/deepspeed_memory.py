"""Memory for the states of a model by DeepSpeed's own formulas, as its `estimate_...` functions print them.

For comparing a plan that was made with them; the arguments and the names are theirs.

P parameters, L those of the largest layer, g devices on each of n nodes, f the buffer factor; bytes per node (CPU) and
per device. They know fp16 training with Adam and nothing of activations; `trilithon train --dry-run` says what a run
needs here.

    stage 3   device: 4 L + (18 P / gn | 2 P / gn | 0)     nothing, the optimizer, or parameters too off the device
              CPU:    4 (L or P) g f without offload (L under zero.Init); else (16 | 18) P f / n, at least 4 P g f
                      without zero.Init
    stage 2   device: 2 P + 18 P / gn, or 2 P with the optimizer off the device
              CPU:    4 P g f, or max(4 P g n f, 16 P f)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

_TIER = {True: "cpu", False: "none"}


def estimate_zero3_model_states_mem_needs(  # noqa: PLR0917 (the arguments and their order are DeepSpeed's)
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    cpu_offload: bool = True, cpu_offload_params: bool = True, zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:  # fmt: skip
    """(bytes of CPU memory per node, of device memory, of the largest layer)."""
    devices, layer = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    whole = 4 * total_params * num_gpus_per_node * additional_buffer_factor
    if not cpu_offload:
        cpu = layer * num_gpus_per_node * additional_buffer_factor if zero_init else whole
        return int(cpu), int(layer + 18 * total_params / devices), layer
    states = (18 if cpu_offload_params else 16) * total_params * additional_buffer_factor / num_nodes
    device = layer + (0 if cpu_offload_params else 2 * total_params / devices)
    return int(states if zero_init else max(whole, states)), int(device), layer


def estimate_zero2_model_states_mem_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """(bytes of CPU memory per node, of device memory)."""
    devices = num_gpus_per_node * num_nodes
    if cpu_offload:
        most = max(4 * total_params * devices, 16 * total_params)
        return int(most * additional_buffer_factor), 2 * total_params
    cpu = 4 * total_params * num_gpus_per_node * additional_buffer_factor
    return int(cpu), int(2 * total_params + 18 * total_params / devices)


def model_to_params(model: Any) -> tuple[int, int]:
    """Of a torch.nn.Module: (parameters, parameters of the largest module, those inside it not counted)."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    return total, max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    """Print the table for numbers of parameters."""
    rows = {}
    for (optimizer, params), init in itertools.product(((1, 1), (1, 0), (0, 0)), (1, 0)):
        name = f"offload_param={_TIER[bool(params)]}, offload_optimizer={_TIER[bool(optimizer)]}, zero_init={init}"
        rows[name] = estimate_zero3_model_states_mem_needs(
            total_params, largest_layer_params, num_gpus_per_node, num_nodes, bool(optimizer), bool(params), bool(init),
            additional_buffer_factor,
        )[:2]  # fmt: skip
    size = f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params."
    _print(num_gpus_per_node, num_nodes, size, rows)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for a number of parameters."""
    given = (total_params, num_gpus_per_node, num_nodes)
    rows = {
        f"offload_optimizer={tier}": estimate_zero2_model_states_mem_needs(*given, offload, additional_buffer_factor)
        for offload, tier in _TIER.items()
    }
    _print(num_gpus_per_node, num_nodes, f"{total_params / 1e6:.0f}M total params.", rows)


def _print(devices: int, nodes: int, size: str, rows: Mapping[str, tuple[int, int]]) -> None:
    print("Memory for parameters, gradients and optimizer states, by DeepSpeed's formulas")
    print(f"{nodes} node{'s' * (nodes > 1)} with {devices} device{'s' * (devices > 1)} each; {size}")
    print("  per CPU  |  per GPU |   Options")
    for options, (cpu, device) in rows.items():
        print(f" {cpu / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {options}")


def estimate_zero3_model_states_mem_needs_all_live(model: Any, *args: int, **settings: float) -> None:
    """Print the table for a model that is there; further arguments as in `..._all_cold`."""
    estimate_zero3_model_states_mem_needs_all_cold(*model_to_params(model), *args, **settings)  # type: ignore[arg-type]


def estimate_zero2_model_states_mem_needs_all_live(model: Any, *args: int, **settings: float) -> None:
    """Likewise."""
    estimate_zero2_model_states_mem_needs_all_cold(model_to_params(model)[0], *args, **settings)  # type: ignore[arg-type]
