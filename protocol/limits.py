"""Every bound of the contract, in one place, with units in the names.

Both sides import these very constants, so that what one side may send the other will take.
Bounds that an operator may change are settings of the coordinator; their defaults stand here.
"""

from typing import Final

MIB: Final = 1 << 20

# Frames
FRAME_PAYLOAD_BYTES_MAX: Final = 1 * MIB  # one DATA frame; 262,144 float32, the fold's tile
META_BYTES_MAX: Final = 16 * MIB  # the META frame: a layout of 100,000 tensors fits

# Layout
TENSORS_MAX: Final = 100_000
TENSOR_NAME_CHARS_MAX: Final = 512
DIMENSIONS_MAX: Final = 16
ELEMENTS_MAX: Final = 1 << 40  # per tensor and per part: no 32-bit size anywhere

# Names and texts
DIGEST_CHARS: Final = 64  # sha256, hex
NAME_CHARS_MAX: Final = 255  # site, job and task names, in characters, any language
METRICS_MAX: Final = 256
METRIC_NAME_CHARS_MAX: Final = 128
METRIC_TEXT_CHARS_MAX: Final = 1_000
REASON_CHARS_MAX: Final = 2_000
NOTES_MAX: Final = 64  # notes of an update, and kinds of discards

# Control messages
JSON_BODY_BYTES_MAX: Final = 32 * MIB  # an event that carries a layout
SMALL_BODY_BYTES_MAX: Final = 1 * MIB  # everything else
JSON_DEPTH_MAX: Final = 32
JOB_FILE_BYTES_MAX: Final = 1 * MIB

# Times, in seconds
LEASE_SECONDS: Final = 15.0
CLOSED_CONNECTION_GRACE_SECONDS: Final = 3.0
LONG_POLL_SECONDS: Final = 25.0
BACKOFF_FIRST_SECONDS: Final = 0.2
BACKOFF_LAST_SECONDS: Final = 5.0
PROGRESS_EVERY_SECONDS: Final = 5.0
TOKEN_TTL_SECONDS_MAX: Final = 24 * 3600.0

# Counts
COUNT_MAX: Final = 1 << 53  # of anything: exact in every JSON reader and database column
EXAMPLES_MAX: Final = 1e12  # declared examples of one update
STEPS_MAX: Final = 1e9  # local steps of one period

# Defaults of the coordinator's caps, in bytes
UPLOAD_BYTES_MAX: Final = 64 << 30
SPOOL_BYTES_MAX: Final = 64 << 30
JOBS_RESIDENT_BYTES_MAX: Final = 8 << 30
