"""Runs a script with fp64 in place of every other precision: ``exact_script.py SCRIPT ARGUMENTS``.

Then losses under different plans differ by 1e-12, and a wrong gradient is not taken for rounding.
"""

import runpy
import sys

from worker.training import precision

precision._BY_NAME.update(dict.fromkeys(precision._BY_NAME, precision.FP64))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
