"""`./launch.sh check`: `report` starts the ranks and prints, `ranks` runs the checks on each of them."""
