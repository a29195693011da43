"""`./launch.sh plan`: predict the step time and the memory of a rank on GPUs, from the events of the real engines.

`setup` builds an engine, `recorder` records what one rank of it does in a step (`events`), and `replay` computes how
long that takes on the GPUs and networks of `hardware`. `page` compares predictions with published measurements.
"""
