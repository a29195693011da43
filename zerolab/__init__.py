"""Everything around the lesson, in four rooms: engine (what every stage needs), run (what starts and feeds a run),
measure (instruments and dry runs), teach (exercises, museum, articles). A room imports from those before it only.
"""

from zerolab.engine import renamed_collectives  # noqa: F401  before anybody calls a collective
