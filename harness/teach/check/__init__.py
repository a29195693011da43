"""`./launch.sh check`: `report` starts the ranks and prints, `ranks` runs on each of them, `steps` holds the checks.

`sheet` is what the checks share.
"""
