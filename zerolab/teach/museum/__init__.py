"""The museum of bugs: `exhibits` are engines that are wrong in one place, `visit` runs one beside the right engine.

`./launch.sh bug` lists them. Nothing here may be imported from below this room.
"""
