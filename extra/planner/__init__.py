"""`./launch.sh plan`: predict how long a step takes on other hardware, from the events of the real engines.

`events`, `one_rank`, `recorder` and `repeat` find out what a step does. `hardware` and `replay` compute how long it
takes. The other files use the result.
"""
