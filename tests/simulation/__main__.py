"""`python -m tests.simulation SEED [--quiet | --member]`: run the schedule of a seed again, and show what happens."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.laws import BrokenLawError
from tests.simulation.member import plan_of, wrong_in
from tests.simulation.schedule import schedule_of
from tests.simulation.world import World


def main() -> int:
    """Run one schedule."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--member", action="store_true", help="a world of member.py")
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    chosen = parser.parse_args()
    if chosen.member:
        print(plan_of(chosen.seed))
        print(wrong := wrong_in(chosen.seed))
        return bool(wrong)
    schedule = schedule_of(chosen.seed)
    print(schedule)
    for plan in schedule.peers:
        print(plan)
    try:
        World(schedule, None if chosen.quiet else print).run()
    except BrokenLawError as broken:
        print(f"broken: {broken}")
        return 1
    print("all laws hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
