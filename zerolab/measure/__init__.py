"""Measure: instruments that watch an engine from outside, dry runs, sweeps, and the pages' tables and figures.

Any object with `model` and `optimizer` is an engine here. One training step, watched on every rank:

    import json, torch.distributed as dist
    from zerolab.measure.held import held_bytes
    from zerolab.measure.ledger import PartsLedger
    from zerolab.measure.timeline import Timeline, chrome_trace
    from zerolab.measure.traffic import TrafficLedger

    with PartsLedger(engine) as memory, TrafficLedger() as traffic, Timeline(engine) as timeline:
        engine.training_step(inputs, targets, loss_fn)
    worst = memory.peak_moment()
    print(held_bytes(engine), worst.live, worst.step, worst.module, worst.parts)
    print(traffic.sent_bytes, [(c.kind, c.whole_bytes, c.step) for c in traffic.collectives])
    live = [(timeline.seconds(moment.when), moment.live) for moment in memory.moments()]
    of_all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, (timeline.spans, live))
    if dist.get_rank() == 0:
        spans, lives = zip(*of_all_ranks)
        with open("trace.json", "w") as file:
            json.dump(chrome_trace(spans, lives), file)

held            bytes of parameters, gradients and optimizer state that this rank holds now
ledger          live bytes and their peak, what they are for, in which step and module
traffic         every collective: its kind, its bytes, its step
timeline        the recorder of a step's events: when each step, module and collective began and ended
intercept       the one place that replaces functions of torch while the instruments are open
watched_step    one step: bytes held right before the update, the peak, every collective
step_time       the parts of a step's time: own work, waiting, exposed communication

A ledger that is opened before the engine is built sees everything that is allocated. If it is opened later, it counts
what can be reached from the engine. Only the first way includes what DDP's C++ reducer keeps.

Steps have names if the code labels them, as the stages do. In your own loop write
`with torch.profiler.record_function("step 1 forward"):` around a step.

The timeline sees every collective, because each one passes torch's dispatcher. It does not see inside a collective: on
a CPU adding up counts as moving bytes. It does not see when gloo's reduce-scatter ends before somebody waits for it,
nor the end of DTensor's functional collectives.

This package imports `zerolab.run`, the engines and the chapters.
"""
