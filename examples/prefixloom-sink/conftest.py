"""The tests import the package from this folder where it is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
