"""The simulated processes live beside the controller bench; tests import them from the repository root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
