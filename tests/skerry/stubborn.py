"""A process that says it is ready and then takes no notice of SIGTERM."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", *sys.argv[1:], flush=True)
    while True:
        signal.pause()
