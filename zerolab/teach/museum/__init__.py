"""The museum of bugs: stages with one mistake each, such as students make. `./launch.sh bug` lists them.

exhibits/   one file per mistake: what a visitor sees, hints, the answer, and the wrong code
loop.py     the training loop in which a mistake shows, and what is measured there
visit.py    the command: a wrong stage trains next to the correct one
"""
