"""DeepSpeed's formulas for the memory of states, by hand on small numbers."""

from __future__ import annotations

import pytest

from trilithon.config import deepspeed_memory as memory


def test_everything_on_the_device_is_eighteen_bytes_for_each_parameter_over_the_devices():
    cpu, device, layer = memory.estimate_zero3_model_states_mem_needs(
        1000, 100, 2, 3, cpu_offload=False, additional_buffer_factor=1.0
    )
    assert (cpu, device, layer) == (4 * 100 * 2, 4 * 100 + 18 * 1000 // 6, 4 * 100)
    assert memory.estimate_zero2_model_states_mem_needs(1000, 2, 3, False, 1.0) == (8000, 2000 + 3000)


def test_what_leaves_the_device_is_on_the_host():
    needs = memory.estimate_zero3_model_states_mem_needs
    assert needs(1000, 100, 2, 2, True, True, True, 1.0) == (18 * 1000 // 2, 400, 400)
    assert needs(1000, 100, 2, 2, True, False, True, 1.0) == (16 * 1000 // 2, 400 + 2 * 1000 // 4, 400)


@pytest.mark.parametrize("rows, table", [(6, memory.estimate_zero3_model_states_mem_needs_all_cold), (2, None)])
def test_tables_have_a_row_for_each_way_to_offload(rows, table, capsys):
    if table is not None:
        table(10**9, 10**7, 4, 2)
    else:
        memory.estimate_zero2_model_states_mem_needs_all_cold(10**9, 4, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2 nodes with 4 devices each; 1000M total params") and len(lines) == 3 + rows
