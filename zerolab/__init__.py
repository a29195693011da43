"""Everything around the three chapters.

engine (the second half of the lesson), run (what starts and feeds a run), measure (instruments and the dry run), teach
(exercises, museum, articles). Each imports only from those before it.
"""
