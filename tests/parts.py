"""The same module as harness/properties/parts.py, under its short name."""

import sys

from harness.properties import parts

sys.modules[__name__] = parts
