"""A module that sleeps, for tests of what starts modules."""

import os
import sys
import time

if __name__ == "__main__":
    print("sleeps", sys.argv[1], "with" if "LAUNCHER_PID" in os.environ else "without", "LAUNCHER_PID", flush=True)
    time.sleep(float(sys.argv[1]))
