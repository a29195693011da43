"""`./launch.sh plan`: how long a step would take on hardware that is not here, from the events of the real engines.

events, one_rank, record, repeat: what a step does; hardware, replay: how long that takes; the rest: its uses.
"""
