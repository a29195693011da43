"""`./launch.sh report`: everything worth knowing of a machine, with one command and in about ten minutes.

commands: what is started, in which order; process: starting it; machine: one of the commands; page: report.md.
"""
