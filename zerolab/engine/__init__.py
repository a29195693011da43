"""Engine: what real training adds to a stage. `from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine`.

An engine is a subclass of its chapter's class, and inherits its steps. Start with `stages.py`, then `unit_life.py`.
"""

from zerolab.engine.stages import ZeRO1Engine, ZeRO2Engine
from zerolab.engine.unit_life import ZeRO3Engine

__all__ = ["ZeRO1Engine", "ZeRO2Engine", "ZeRO3Engine"]
