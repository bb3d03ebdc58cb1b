"""Where the log goes, and in which encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import logging
from coordinator.logs import setup
setup("info")
logging.getLogger("coordinator.x").info("site %s", "\\u75c5\\u9662-3", extra={"site": "lab-\\U0001f52c"})
logging.getLogger("coordinator.x").debug("unseen")
logging.getLogger("aiohttp.server").warning("unseen")
"""


def test_the_log_is_utf_8_whatever_the_locale_says():
    """PC-085: with LANG=C and PYTHONUTF8=0 names in the log are still right."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "LANG": "C",
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        },
        capture_output=True,
        check=True,
        timeout=30,
    )
    lines = ran.stderr.decode("utf-8").splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["message"] == "site 病院-3"
    assert json.loads(lines[0])["site"] == "lab-🔬"
