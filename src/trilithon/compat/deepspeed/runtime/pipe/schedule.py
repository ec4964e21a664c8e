"""`deepspeed.runtime.pipe.schedule`: orders are data here, chosen by pipeline.schedule in the configuration."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "trilithon.parallel.pipeline.make_orders gives every stage's order; pipeline.schedule chooses one."

PipeSchedule = refused("runtime.pipe.schedule.PipeSchedule", _WAY)
TrainSchedule = refused("runtime.pipe.schedule.TrainSchedule", _WAY)
InferenceSchedule = refused("runtime.pipe.schedule.InferenceSchedule", _WAY)
DataParallelSchedule = refused("runtime.pipe.schedule.DataParallelSchedule", _WAY)
PipeInstruction = refused("runtime.pipe.schedule.PipeInstruction", _WAY)
