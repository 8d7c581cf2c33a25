"""Python runs this file at the start of each process that has its folder in PYTHONPATH.

So a fault is planted in the process of pytest and in all that its tests start.
"""

from tests.mutants.planted import plant_from_environment

plant_from_environment()
