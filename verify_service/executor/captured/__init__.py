"""The target's decode steps as CUDA graphs.

A step passes through these, in order:

- `executor.GraphExecutor` takes a `Step` and decides how it runs.
- `fill.RecordFiller` writes a record for each sequence, `step_buffers.StepBuffers` sends them.
- `graphs.DecodeGraphs` replays one graph, `two_phase_graphs.TwoPhaseGraphs` two of them.
- `step.DecodeStep` is what was captured.
- `running_step.RunningStep` fetches the outcome.
- `pending.GraphRun` and `two_phase.TwoPhaseRun` give it to the engine as a `StepResult`.

`mixed.MixedGraphs` is the forward of steps with prompts. With several ranks, a
`listener.StepListener` tells the others.
"""
