"""`./launch.sh report`: everything worth knowing of a machine, with one command and in about ten minutes.

plan: the parts and their jobs; jobs: running them; machine, figures: two jobs; results: what is kept; page: report.md.
"""
